"""`group`: puts tokens of the cache into units, and says what is known of these."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from accel.ir.entries import EntryKind

if TYPE_CHECKING:
    from torch import Tensor


class _Group(EntryKind):
    def example(self, program: Any, name: str) -> dict[str, Tensor]:
        """Two rows with random keys, of which the second has fewer tokens."""
        import torch

        from accel.ir.entries._values import filled, numbers, random
        from accel.ir.state import Part

        generator, plan = random(), program.facts.units
        count, units = 2 * plan.size + 1, 3
        values = {
            "start": numbers([3, 0]),
            "stop": numbers([3 + count, plan.size]),
            "first": numbers([0, 1]),
            "units": numbers([units, 1]),
            "origin": numbers([3 + count, 5]),
            "ranks": torch.arange(count),
            "numbers": torch.arange(units),
            "marks": torch.arange(count).div(plan.size, rounding_mode="floor").expand(2, -1),
        }
        entry = program.entries[name]
        for state in (s for s in program.state if s.name in entry.inputs):
            blank = state.allocate(B=2, C=count + plan.size + 4)
            keys = state.part is not Part.UNITS
            values[state.name] = filled(blank.shape, blank.dtype, generator) if keys else blank
        return {n: v for n, v in values.items() if n in entry.inputs}


GROUP = _Group("group", chooses=True, feature="units")
