"""Keep all tokens: sessions can be rewound as far as those of any other model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from accel.ir.program import Program
from accel.passes import Report
from accel.passes.window import Base
from accel.passes.window._layers import readers, window_of


@dataclass(frozen=True)
class All(Base):
    """The cache of every layer grows with the text."""

    by_position: ClassVar[bool] = True

    def run(self, program: Program) -> Report:
        found = [nodes for nodes in readers(program).values() if window_of(nodes)]
        return Report(len(found), [] if found else ["no layer of this model has a window"])
