"""What several refines share."""

from __future__ import annotations

from torch import Tensor


def ranks_of(scores: Tensor) -> Tensor:
    """The place of each slot along the last axis, the highest score first, of equal scores the newest."""
    order = scores.flip(-1).sort(stable=True, dim=-1, descending=True).indices
    return order.sort(-1).indices.flip(-1)


def above_zero(scores: Tensor) -> Tensor:
    """The same where none is below 0; else counted from the lowest of a head [B,G,S]."""
    return scores - scores.amin(-1, keepdim=True).clamp(max=0)
