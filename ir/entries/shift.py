"""`shift`: turns cached keys to other positions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from accel.ir.entries import EntryKind

if TYPE_CHECKING:
    from torch import Tensor


def keys_of(layer: int) -> str:
    """The input with keys of a layer [B,G,S,D]."""
    return f"keys.{layer}"


def turned_of(layer: int) -> str:
    """The output with the same keys at their new positions."""
    return f"turned.{layer}"


class _Shift(EntryKind):
    def example(self, program: Any, name: str) -> dict[str, Tensor]:
        """Random keys of two rows that go forth and back."""
        import torch

        from accel.ir.entries._values import numbers, random

        generator, delta = random(), numbers([[3, 3, 0], [-5, -5, 1]])
        found = {"delta": delta}
        for holder in program.entries[name].graph.find_nodes(op="placeholder")[1:]:
            _, groups, _, width = holder.meta["val"].shape
            shape = (2, int(groups), delta.shape[1], int(width))
            found[str(holder.target)] = torch.randn(shape, generator=generator)
        return found


SHIFT = _Shift("shift", threads=1, error=1e-4)
