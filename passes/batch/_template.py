"""NAME (paper, arXiv): what it does, in a sentence."""

from __future__ import annotations

from dataclasses import dataclass

from accel.ir.program import Program
from accel.passes import Report
from accel.passes.batch import Base
from accel.passes.batch.flat import flat


@dataclass(frozen=True)
class Template(Base):
    """How the tokens of rows lie in a call."""

    def run(self, program: Program) -> Report:
        return flat(program)
