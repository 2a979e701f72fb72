"""Models that give a graph of tokens in one call, as DA-Transformer (arXiv:2205.07459): what decoding knows of one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from accel.ir.errors import CaptureError
from accel.ir.fields import Positive


@dataclass(frozen=True)
class Paths:
    """Each slot of the decoder is a vertex. Behind its logits a step gives `heads` queries and as many keys of `size`
    numbers, and a gate for each head: what the transitions between vertices are made of.

    scale: vertices for each token of the source. last: the token that stands at the last vertex. padding: a token that
    is no text; None: there is none.
    """

    heads: Positive
    size: Positive
    scale: float
    last: int
    padding: int | None = None

    @property
    def width(self) -> int:
        """How many numbers these are for a vertex."""
        return self.heads * (2 * self.size + 1)


def paths_of(config: Any) -> Paths | None:
    """By a configuration's `transition_heads`, `transition_size`, `upsample_scale`, `eos_token_id` and `pad_token_id`;
    None: it names no transitions. Raises CaptureError.
    """
    names = ("transition_heads", "transition_size", "upsample_scale", "eos_token_id")
    heads, size, scale, last = (getattr(config, name, None) for name in names)
    if heads is None:
        return None
    counts = {"transition_heads": heads, "transition_size": size}
    wrong = [n for n, v in counts.items() if not isinstance(v, int) or v < 1]
    wrong += ["upsample_scale"] if not isinstance(scale, int | float) or not scale > 0 else []
    wrong += ["eos_token_id"] if not isinstance(last, int) else []
    if wrong:
        raise CaptureError(
            f"config.{wrong[0]} is {getattr(config, wrong[0], None)!r}: a model with transition_heads needs "
            f"transition_size and upsample_scale above 0, and one eos_token_id; set config.{wrong[0]}"
        )
    assert isinstance(size, int) and isinstance(scale, int | float) and isinstance(last, int)
    padding = getattr(config, "pad_token_id", None)
    return Paths(heads, size, float(scale), last, padding if isinstance(padding, int) else None)
