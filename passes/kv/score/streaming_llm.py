"""StreamingLLM (arXiv:2309.17453): keep the first tokens (attention sinks) and the newest tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from accel.ir.axis import option
from accel.ir.invariants import Invariant
from accel.passes.kv.score import Base


@dataclass(frozen=True)
class StreamingLlm(Base):
    """`sinks`: number of first tokens to keep; the rest of the budget is the window of newest tokens."""

    sinks: int = option(4, least=0)
    when: ClassVar[str] = "every"
    small: ClassVar[Mapping[str, Any]] = {"sinks": 2}
    by_position: ClassVar[bool] = True

    @property
    def breaks(self) -> frozenset[Invariant]:
        """Heads keep the same positions."""
        return super().breaks - {Invariant.HEADS_ALIKE}

    def __call__(self, positions: Tensor) -> Tensor:
        return positions.float()
