"""A constant draft length (arXiv:2211.17192)."""

from __future__ import annotations

from dataclasses import dataclass

from accel.ir.axis import count
from accel.ir.errors import RecipeError
from accel.runtime.length import Base, Pace
from accel.runtime.speculation.round_cost import RoundCost


@dataclass(frozen=True)
class Fixed(Base, Pace):
    """Drafts of up to `tokens` tokens; the default is that of transformers' prompt lookup."""

    tokens: int = count(10, most=256)

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise RecipeError(f"length.fixed: tokens is {self.tokens}; give at least 1")

    def begin(self, cost: RoundCost) -> Pace:
        return self

    def limit(self) -> int:
        return self.tokens
