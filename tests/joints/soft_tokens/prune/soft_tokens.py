"""Embeddings that a caller gives stand for some tokens of a call, as those of an image do."""

from __future__ import annotations

from dataclasses import dataclass

from accel.ir.invariants import Invariant
from accel.ir.program import Program
from accel.passes import Report
from accel.passes.prefill.prune import Base
from accel.passes.state.embedded import embedded, embeddings


@dataclass(frozen=True)
class SoftTokens(Base):
    by_position = True
    grade = "lossless"
    relies = Base.relies | {Invariant.ALL_LAYERS_RUN}

    def run(self, program: Program) -> Report:
        program.entries["soft.embed"] = embeddings(program, "soft-tokens")
        program.entries["soft.step"] = embedded(program, "soft-tokens")
        return Report(changed=2)
