"""NAME (paper, arXiv): what it does, in a sentence."""

from __future__ import annotations

from dataclasses import dataclass

from accel.ir.axis import option
from accel.ir.depth import NESTED, Depth
from accel.ir.errors import PassError
from accel.ir.program import Program
from accel.passes import Report
from accel.passes.depth import Base
from accel.passes.depth._joint import conditions


@dataclass(frozen=True)
class Template(Base):
    """The layers that a token after the prompt goes through: here, all but `skipped`."""

    skipped: int = option(1, least=0)

    def run(self, program: Program) -> Report:
        count = len(program.facts.layers)
        if not self.skipped < count - 1:
            raise PassError(
                f"template: skipped is {self.skipped}, and of {count} layers the last always runs"
            )
        calls = conditions(program, NESTED)
        program.facts.depth = Depth(tuple(i != self.skipped for i in range(count)), NESTED)
        return Report(changed=len(calls))
