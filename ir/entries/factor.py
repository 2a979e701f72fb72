"""`factor`: writes keys of a prompt as their products with given directions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from accel.ir.entries import EntryKind

if TYPE_CHECKING:
    from torch import Tensor


def directions_of(layer: int) -> str:
    """The input with a layer's directions [B,G,R,D]: R of length 1 and at right angles, all heads together."""
    return f"directions.{layer}"


class _Factor(EntryKind):
    def example(self, program: Any, name: str) -> dict[str, Tensor]:
        """Two rows with random keys, of which the second has fewer tokens."""
        from accel.ir.entries._values import some_keys

        return some_keys(program, name)


FACTOR = _Factor("factor", feature="low_rank")
