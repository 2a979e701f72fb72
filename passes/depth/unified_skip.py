"""Unified layer skipping (arXiv:2404.06954): run evenly spaced layers, as many as a target speed-up allows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from accel.ir.axis import option
from accel.ir.depth import CACHES, NESTED, Depth
from accel.ir.errors import PassError
from accel.ir.invariants import Invariant
from accel.ir.program import Program
from accel.passes import Report
from accel.passes.depth import Base
from accel.passes.depth._joint import conditions


@dataclass(frozen=True)
class UnifiedSkip(Base):
    """A prompt runs all L layers, each generated token floor(L / speedup) of them."""

    speedup: float = option(2.0, least=1)
    cache: str = option(NESTED, one_of=CACHES)
    small: ClassVar[Mapping[str, Any]] = {"speedup": 1.4}

    @property
    def breaks(self) -> frozenset[Invariant]:
        """With a speedup of 1 single tokens go through all layers too."""
        return super().breaks if self.speedup > 1 else frozenset({Invariant.ALL_LAYERS_RUN})

    def run(self, program: Program) -> Report:
        count = len(program.facts.layers)
        if count < 2:
            raise PassError(f"unified-skip: {count} layers, but the first and the last always run")
        if int(count / self.speedup) < 2:
            raise PassError(
                f"unified-skip: {count} layers at speedup = {self.speedup:g} leave "
                f"{int(count / self.speedup)}, but the first and the last always run; give a speedup of at "
                f"most {count / 2:g}"
            )
        calls = conditions(program, self.cache)
        program.facts.depth = Depth(tuple(evenly(count, int(count / self.speedup))), self.cache)
        return Report(changed=len(calls))


def evenly(count: int, run_count: int) -> list[bool]:
    """Which of `count` layers run, `run_count` of them (at least two): both ends, and every n-th between."""
    interval = count // (run_count - 1)
    inner = [i for i in range(1, count - 1) if i % interval == 0][: run_count - 2]
    chosen = {0, *inner, count - 1}
    return [i in chosen for i in range(count)]
