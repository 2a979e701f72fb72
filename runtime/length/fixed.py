"""A constant draft length (arXiv:2211.17192)."""

from __future__ import annotations

from dataclasses import dataclass

from accel.ir.axis import option
from accel.runtime.length import Base, Pace
from accel.runtime.speculation.round_cost import RoundCost


@dataclass(frozen=True)
class Fixed(Base, Pace):
    """Drafts of up to `tokens` tokens; the default is that of transformers' prompt lookup."""

    tokens: int = option(10, least=1, most=256)

    def begin(self, cost: RoundCost) -> Pace:
        return self

    def limit(self) -> int:
        return self.tokens
