"""NAME (paper, arXiv): what it does, in a sentence."""

from __future__ import annotations

from dataclasses import dataclass

from accel.ir.program import Program
from accel.passes import Report
from accel.passes.head import Base


@dataclass(frozen=True)
class Template(Base):
    """What it computes in place of the product."""

    def run(self, program: Program) -> Report:
        return Report(refused=[f"{self.product(program).name} stays as it is"])
