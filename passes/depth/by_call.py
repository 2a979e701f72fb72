"""Layers as an input: a call selects the layers that it runs (`run_layers`); the default is all layers."""

from __future__ import annotations

from dataclasses import dataclass

from accel.ir.depth import NESTED, Depth
from accel.ir.invariants import Invariant
from accel.ir.program import Program
from accel.passes import Report
from accel.passes.depth import Base
from accel.passes.depth._joint import conditions


@dataclass(frozen=True)
class ByCall(Base):
    """For drafts of fewer layers, such as `draft = layerskip`. A layer that is skipped for a token stays off until that
    token is rewound.

    Before and after: `tests/passes/texts/by_call.before.txt`, `by_call.after.txt`.
    """

    grade = "lossless"
    breaks = frozenset({Invariant.ALL_LAYERS_RUN})

    def run(self, program: Program) -> Report:
        calls = conditions(program, NESTED)
        program.facts.depth = Depth((True,) * len(calls), NESTED)
        return Report(changed=len(calls))
