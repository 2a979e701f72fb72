"""BASS (arXiv:2404.15778): one draft length for all rows of a batch, by the row that took most tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from accel.ir.axis import option
from accel.ir.errors import RecipeError
from accel.runtime.call import Logits
from accel.runtime.decode.row import Row
from accel.runtime.inputs.ints import Ints
from accel.runtime.length import Base, Pace, Paces
from accel.runtime.speculation.round_cost import RoundCost
from accel.runtime.tree import Level


@dataclass(frozen=True)
class Bass(Base):
    """Drafts of `tokens` tokens at first. After a round in which some row took the whole of the longest draft, `more`
    tokens more, up to `most`; after any other, a `part`-th less, and one less again where the round before fell short,
    too, but not less than what some row took. A row that ends, or drafts nothing, does not count.
    """

    tokens: int = option(7, least=1, most=256)
    more: int = option(2, least=1, most=256)
    part: int = option(10, least=1, most=256)
    most: int = option(32, least=1, most=256)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tokens > self.most:
            raise RecipeError(
                f"{self.full_name}: tokens is {self.tokens}, more than most = {self.most}; give at most that many"
            )

    def begin(self, cost: RoundCost) -> Pace:
        """For a batch of one."""
        return _One(_Common(self))

    def open(self, rows: Sequence[Row], cost: RoundCost) -> Paces:
        return _Common(self)


class _Common(Paces):
    """Rows that join draft as many as those that are there."""

    joins = True

    def __init__(self, of: Bass):
        self._of, self._length = of, of.tokens
        self._short = 0  # 1 where the last round fell short
        self._drafted = self._accepted = 0  # of this round: the most of any row

    def join(self, other: Self) -> None:
        """What others learnt of their rows is dropped."""

    def leave(self, order: Ints) -> None:
        """What was learnt of a row that goes stands for those that stay."""

    def limits(self, rows: Sequence[int]) -> Mapping[int, int]:
        if self._drafted:
            self._adapt()
        return dict.fromkeys(rows, self._length)

    def more(self, row: int, level: Level, logits: Sequence[Logits]) -> bool:
        return True

    def observe(self, row: int, drafted: int, accepted: int) -> None:
        self._drafted = max(self._drafted, drafted)
        self._accepted = max(self._accepted, accepted)

    def _adapt(self) -> None:
        """After a round."""
        of, length = self._of, self._length
        if self._accepted >= self._drafted:
            self._length, self._short = min(length + of.more, of.most), 0
        else:
            shorter = length - -(-length // of.part) - self._short
            self._length, self._short = max(1, shorter, self._accepted), 1
        self._drafted = self._accepted = 0


@dataclass(frozen=True)
class _One(Pace):
    rows: _Common

    def limit(self) -> int:
        return self.rows.limits([0])[0]

    def observe(self, drafted: int, accepted: int) -> None:
        self.rows.observe(0, drafted, accepted)
