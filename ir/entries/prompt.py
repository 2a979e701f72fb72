"""`prompt.<number>`: the layers of the step in parts, between which tokens of a prompt are dropped."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from accel.ir.entries import EntryKind

if TYPE_CHECKING:
    from torch import Tensor

    from accel.ir.facts import Facts


def part_of(number: int) -> str:
    """The entry of the layers behind so many stages, up to the next."""
    return f"{PROMPT.name}.{number}"


class _Prompt(EntryKind):
    def names(self, facts: Facts) -> Sequence[str]:
        """By the plan of the prompt: one part more than stages."""
        stages = facts.prefill.stages if facts.prefill is not None else ()
        return [part_of(i) for i in range(len(stages) + 1 if stages else 0)]

    def example(self, program: Any, name: str) -> dict[str, Tensor]:
        """Two rows of an empty cache."""
        from accel.ir.entries._values import some_layers

        return some_layers(program, name)


PROMPT = _Prompt("prompt", variants=True, rounds=True, feature="prefill")
