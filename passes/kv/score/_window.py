"""What several scores share: pooling along the slots."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad


def pooled(scores: Tensor, positions: Tensor, kernel: int, pooling: str) -> Tensor:
    """The mean (zeros beyond the ends count) or the largest of `kernel` neighbours among the slots that
    hold something: scores [B,G,R,S], positions [B,G,S].
    """
    half = kernel // 2
    place = (positions >= 0).long().cumsum(-1) - 1
    place = place.masked_fill(positions < 0, scores.shape[-1])  # empty: beyond the last
    place = place[:, :, None].expand(scores.shape)
    close = torch.zeros_like(pad(scores, (0, 1))).scatter(-1, place, scores)[..., :-1]
    wide = pad(close, (half, half))
    shifted = [wide[..., i : i + scores.shape[-1]] for i in range(kernel)]
    total = shifted[0]
    for other in shifted[1:]:
        total = torch.maximum(total, other) if pooling == "max" else total + other
    found = total if pooling == "max" else total / kernel
    return pad(found, (0, 1)).gather(-1, place)
