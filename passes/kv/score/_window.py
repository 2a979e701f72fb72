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
    scores = scores.masked_fill((k < 0) | (k > q), torch.finfo(torch.float32).min)
    probs: Tensor = scores.softmax(-1) * (q >= 0)
    return probs


def pooled(scores: Tensor, kernel: int, pooling: str) -> Tensor:
    """The mean (zeros beyond the ends count) or the largest of `kernel` neighbours along the last axis."""
    half = kernel // 2
    wide = pad(scores, (half, half))
    shifted = [wide[..., i : i + scores.shape[-1]] for i in range(kernel)]
    total = shifted[0]
    for other in shifted[1:]:
        total = torch.maximum(total, other) if pooling == "max" else total + other
    return total if pooling == "max" else total / kernel
