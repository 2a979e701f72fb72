"""NAME (paper, arXiv): what it does, in a sentence."""

from __future__ import annotations

from dataclasses import dataclass

from accel.ir.axis import option
from accel.runtime.length import Base, Pace
from accel.runtime.speculation.round_cost import RoundCost


@dataclass(frozen=True)
class Template(Base, Pace):
    """How many tokens a round drafts: here, `tokens`."""

    tokens: int = option(10, least=1, most=256)

    def begin(self, cost: RoundCost) -> Pace:
        return self

    def limit(self) -> int:
        return self.tokens
