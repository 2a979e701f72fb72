"""Models that fill masks: what decoding has to know of one (masked diffusion, arXiv:2502.09992)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Diffusion:
    """mask: the id that stands where a token is not known yet; None: there is none, as in an encoder-decoder whose
    decoder sees both ways and rewrites its text. shift: the logits of a token say what follows it (Dream, and other
    models that were adapted from causal ones), not what it is itself (LLaDA).
    """

    mask: int | None = None
    shift: bool = False


@dataclass(frozen=True)
class Blocks:
    """Of a causal model that was also trained to fill masks behind a text, where a block sees the text and itself, both
    ways. mask: as of `Diffusion`. size: tokens of a block, at most, in training. Logits of a token say what follows it.
    """

    mask: int
    size: int


def blocks_of(config: Any) -> Blocks | None:
    """By a configuration's `mask_token_id`, `logit_shift` and `block_size`; None: it names no such blocks."""
    found, size = diffusion_of(config), getattr(config, "block_size", None)
    if found is None or found.mask is None or not found.shift:
        return None
    if not isinstance(size, int) or isinstance(size, bool):
        return None
    return Blocks(found.mask, size) if size > 0 else None


def diffusion_of(config: Any) -> Diffusion | None:
    """By a configuration's `mask_token_id` and `logit_shift`; None: it names no mask."""
    mask = getattr(config, "mask_token_id", None)
    if not isinstance(mask, int) or isinstance(mask, bool) or mask < 0:
        return None
    return Diffusion(mask, bool(getattr(config, "logit_shift", False)))
