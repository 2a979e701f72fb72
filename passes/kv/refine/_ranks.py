"""What several refines share."""

from __future__ import annotations

from torch import Tensor


def above_zero(scores: Tensor) -> Tensor:
    """The same where none is below 0; else counted from the lowest of a head [B,G,S]."""
    return scores - scores.amin(-1, keepdim=True).clamp(max=0)
