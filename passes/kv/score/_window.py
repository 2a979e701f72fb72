"""What several scores share: attention of the last queries, and pooling along the slots."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad


def observed(
    queries: Tensor, query_positions: Tensor, keys: Tensor, positions: Tensor, scale: float
) -> Tensor:
    """softmax(scale q k^T) of queries [B,H,W,D], causal by positions -> [B,G,R,W,S]; a query that is
    not there (-1) gives nothing.
    """
    groups = keys.shape[1]
    grouped = queries.unflatten(1, (groups, queries.shape[1] // groups))
    scores = (grouped.float() @ keys.float()[:, :, None].transpose(-1, -2)) * scale
    q = query_positions[:, None, None, :, None]
    k = positions[:, :, None, None, :]
    hidden = (k < 0) | (k > q)
    scores = scores.masked_fill(hidden, torch.finfo(torch.float32).min)
    seen: Tensor = scores.softmax(-1).masked_fill(hidden, 0)  # nothing, where its keys all went
    return seen


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
