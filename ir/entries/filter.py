"""`filter`: the first layers of the step, which say what tokens of a prompt the model then sees."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from accel.ir.entries import EntryKind

if TYPE_CHECKING:
    from torch import Tensor

    from accel.ir.facts import Facts


class _Filter(EntryKind):
    def names(self, facts: Facts) -> Sequence[str]:
        """By the plan of the prompt."""
        return [self.name] if facts.prefill is not None and facts.prefill.filter else []

    def example(self, program: Any, name: str) -> dict[str, Tensor]:
        """Two rows of an empty cache."""
        from accel.ir.entries._values import some_layers

        return some_layers(program, name)


FILTER = _Filter("filter", variants=True, rounds=True, feature="prefill")
