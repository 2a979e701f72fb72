"""`fill`: what a step writes of its tokens, without logits or what only these need."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from accel.ir.entries import EntryKind

if TYPE_CHECKING:
    from torch import Tensor

    from accel.ir.facts import Facts


class _Fill(EntryKind):
    def names(self, facts: Facts) -> Sequence[str]:
        """By the plan of the prompt."""
        return [self.name] if facts.prefill is not None and facts.prefill.fill else []

    def example(self, program: Any, name: str) -> dict[str, Tensor]:
        """Two rows of an empty cache."""
        from accel.ir.entries._values import some_layers

        return some_layers(program, name)


FILL = _Fill("fill", variants=True, rounds=True, feature="prefill")
