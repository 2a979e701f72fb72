"""`blend.0`, `blend.1`: the layers up to one that tells which reused tokens are stale, and those behind it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from accel.ir.entries import EntryKind

if TYPE_CHECKING:
    from torch import Tensor

EARLY, LATE = "blend.0", "blend.1"


def telling(layer: int, count: int) -> int:
    """The last layer of `blend.0`, of a model of `count` layers; -1: the second, or the first of two."""
    return min(1, count - 2) if layer < 0 else layer


class _Blend(EntryKind):
    def example(self, program: Any, name: str) -> dict[str, Tensor]:
        """Two rows of an empty cache."""
        from accel.ir.entries._values import some_layers

        return some_layers(program, name)


BLEND = _Blend("blend", variants=True, rounds=True)
