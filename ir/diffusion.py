"""Models that fill masks: what decoding has to know of one (masked diffusion, arXiv:2502.09992)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from accel.ir.fields import Fields


@dataclass(frozen=True)
class Diffusion:
    """mask: the id that stands where a token is not known yet. shift: the logits of a token say what follows it
    (Dream, and other models that were adapted from causal ones), not what it is itself (LLaDA).
    """

    mask: int
    shift: bool = False

    @classmethod
    def from_json(cls, f: Fields, vocab: int) -> Diffusion:
        """Of a model of so many tokens. Raises ArtifactError."""
        if (mask := f.integer("mask")) >= vocab:
            raise f.wrong("mask", mask, f"a token id, 0..{vocab - 1}")
        return cls(mask, f.boolean("shift"))


def diffusion_of(config: Any) -> Diffusion | None:
    """By a configuration's `mask_token_id` and `logit_shift`; None: it names no mask."""
    mask = getattr(config, "mask_token_id", None)
    if not isinstance(mask, int) or isinstance(mask, bool) or mask < 0:
        return None
    return Diffusion(mask, bool(getattr(config, "logit_shift", False)))
