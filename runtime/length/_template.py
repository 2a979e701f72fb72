"""NAME (paper, arXiv): what it does, in a sentence."""

from __future__ import annotations

from dataclasses import dataclass

from accel.ir.axis import count
from accel.ir.errors import RecipeError
from accel.runtime.length import Base, Pace
from accel.runtime.speculation.round_cost import RoundCost


@dataclass(frozen=True)
class Template(Base, Pace):
    """How many tokens a round drafts: here, `tokens`."""

    tokens: int = count(10, most=256)

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise RecipeError(f"length.template: tokens is {self.tokens}; give 1 or more")

    def begin(self, cost: RoundCost) -> Pace:
        return self

    def limit(self) -> int:
        return self.tokens
