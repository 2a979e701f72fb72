"""`sparse`: the step for a segment of a prompt whose tokens read some of the keys before it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from accel.ir.entries import EntryKind

if TYPE_CHECKING:
    from torch import Tensor

    from accel.ir.facts import Facts


class _Sparse(EntryKind):
    def names(self, facts: Facts) -> Sequence[str]:
        """By the plan of the prompt."""
        return [self.name] if facts.prefill is not None and facts.prefill.segments else []

    def example(self, program: Any, name: str) -> dict[str, Tensor]:
        """One row behind random keys and values, as many as a segment may have before it."""
        import torch

        from accel.ir.entries._values import SLOTS, cached, call, random, taken

        entry, plan = program.entries[name], program.facts.prefill.segments
        start = -(-plan.threshold // plan.tokens) * plan.tokens
        width = min(5, program.facts.max_context - start)
        slots = -(-(start + width) // SLOTS) * SLOTS
        given = call(program, 1, width, start)
        given["rows"] = torch.zeros(1, 1, dtype=torch.int64)
        generator = random()
        for state in program.state:
            blank = state.allocate(B=1, C=slots)
            given[state.name] = cached(state, blank, torch.arange(slots)[None], generator)
        return taken(entry, given)


SPARSE = _Sparse("sparse", variants=True, rounds=True, chooses=True, feature="prefill")
