"""A fixed pattern of steps and drafts (VITA-Audio, arXiv:2505.03739)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from accel.ir.errors import RecipeError, shown
from accel.runtime.length import Base, Pace
from accel.runtime.speculation.round_cost import RoundCost

MOST = 1 << 20  # steps of a pair; a pattern that begins so never drafts
TURBO = (1, 10)


@dataclass(frozen=True)
class Interleave(Base):
    """`pattern`: pairs of numbers, such as `[1, 10, 4, 10]`: so many tokens of the model, then so many drafted ones,
    and so on; the last pair is repeated. Not given: `[1, 10]`. The first token of the model is that behind the prompt.

    A row near its end drafts less, as its last token is the model's.
    """

    pattern: Any = None

    def __post_init__(self) -> None:
        super().__post_init__()
        given = TURBO if self.pattern is None else self.pattern
        good = isinstance(given, Sequence) and not isinstance(given, str) and len(given) > 0
        good = good and len(given) % 2 == 0
        good = good and all(isinstance(n, int) and not isinstance(n, bool) for n in given)
        if not (good and all(1 <= n <= MOST for n in given[::2])):
            raise RecipeError(
                f"{self.full_name}: pattern is {shown(given)}; give pairs of whole numbers, 1 or more tokens of the "
                "model and then drafted ones, such as [1, 10, 4, 10]"
            )
        if not all(0 <= n <= 256 for n in given[1::2]):
            raise RecipeError(
                f"{self.full_name}: pattern is {shown(given)}; draft 0 to 256 tokens at a time"
            )

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """Tokens of the model and drafted tokens."""
        given = TURBO if self.pattern is None else self.pattern
        return list(zip(given[::2], given[1::2], strict=True))

    def begin(self, cost: RoundCost) -> Pace:
        return _Turns(self.pairs)


@dataclass
class _Turns(Pace):
    """Where a row is: a pair, and the tokens of the model that it took of it, at first that behind the prompt."""

    pairs: list[tuple[int, int]]
    pair: int = 0
    taken: int = 1

    def limit(self) -> int:
        steps, drafted = self.pairs[self.pair]
        if self.taken < steps:
            self.taken += 1
            return 0
        self.pair, self.taken = min(self.pair + 1, len(self.pairs) - 1), 1
        return drafted
