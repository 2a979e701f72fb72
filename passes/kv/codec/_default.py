"""What a recipe with weights in few bits has that says nothing of the cache."""

from __future__ import annotations

from dataclasses import dataclass

from accel.ir.program import Program
from accel.passes import Report
from accel.passes.kv.codec._encode import STORED, Encode


@dataclass(frozen=True)
class IfCached(Encode):
    """A codec, where the model has a cache to encode."""

    def run(self, program: Program) -> Report:
        cached = any(s.stored and s.region in STORED for s in program.state)
        return super().run(program) if cached else Report()
