"""What several refines share: the tokens of a prompt, once others are generated."""

from __future__ import annotations

from torch import Tensor


def frozen(positions: Tensor, prompt: Tensor, seen: Tensor) -> Tensor:
    """Whether a slot holds a token of a prompt that is whole [B,G,S]."""
    before = (positions >= 0) & (positions < prompt[:, None, None])
    return before & (seen > prompt)[:, None, None]
