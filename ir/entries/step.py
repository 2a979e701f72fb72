"""`step`: one call of the model over its state, which every program has."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from accel.ir.entries import EntryKind
from accel.ir.state import writes_state

if TYPE_CHECKING:
    from torch import Tensor

LOGITS = "logits"


def is_extra(output: str) -> bool:
    """Whether an output is neither the logits nor state: what a method asks for by name, such as queries."""
    return output != LOGITS and not writes_state(output)


class _Step(EntryKind):
    def example(self, program: Any, name: str) -> dict[str, Tensor]:
        """Two rows of an empty cache, with logits for every token."""
        from accel.ir.capture.examples import side_inputs
        from accel.ir.entries._values import call, empty_state, taken

        given = call(program, 2, min(13, program.facts.max_context))
        given["rows"] = given["positions"]
        side, state = side_inputs(program, 2), empty_state(program, program.step, 2)
        return taken(program.step, program.step.defaults, given, side, state)


STEP = _Step("step", variants=True, rounds=True)
