"""`squares`: what the directions of a prompt's keys are found by, the sums of the keys' outer products."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from accel.ir.entries import EntryKind

if TYPE_CHECKING:
    from torch import Tensor


def squares_of(layer: int) -> str:
    """The output with a layer's sum [B,G D,G D], keys before RoPE and all heads together."""
    return f"{SQUARES.name}.{layer}"


class _Squares(EntryKind):
    def example(self, program: Any, name: str) -> dict[str, Tensor]:
        """Two rows with random keys, of which the second has fewer tokens."""
        from accel.ir.entries._values import some_keys

        return some_keys(program, name)


SQUARES = _Squares("squares", feature="low_rank")
