"""NAME (paper, arXiv): what it does, in a sentence."""

from __future__ import annotations

from dataclasses import dataclass

from accel.ir.program import Program
from accel.passes import Report
from accel.passes.numerics import Base


@dataclass(frozen=True)
class Template(Base):
    """What it promises; a program for which it cannot is refused with a PassError."""

    def run(self, program: Program) -> Report:
        return Report()
