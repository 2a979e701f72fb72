"""Axis: how many tokens are drafted in a round."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from accel.ir.invariants import Method
from accel.runtime.call import Logits
from accel.runtime.decode.rounds import picked
from accel.runtime.decode.row import Row
from accel.runtime.inputs.ints import Ints
from accel.runtime.speculation.round_cost import RoundCost
from accel.runtime.tree import Level

__all__ = ["Base", "Pace", "Paces"]


class Pace(ABC):
    """Says it for one row, from its prompt to its end."""

    @abstractmethod
    def limit(self) -> int:
        """Most tokens of the next draft, 0 or more."""

    def more(self, level: Level, logits: Sequence[Logits]) -> bool:
        """Whether to draft another level after one whose tokens [n] were chosen by these logits, [V] each (not to be
        kept). Drafters that run a model ask after each level that they could go on from, in turn; a chain's is one
        token, and the last that its limit allows is told too. The tokens stay in the draft whatever the answer, or
        samples would lean towards what drafters are sure of.
        """
        return True

    def observe(self, drafted: int, accepted: int) -> None:  # noqa: B027
        """What became of a draft: how many levels it had (a chain's tokens), how many of them stand."""


class Paces(ABC):
    """Says it for all rows of a session, round by round; rows are named by their numbers."""

    @property
    def joins(self) -> bool:
        """Whether rows may `join` and `leave`."""
        return False

    def join(self, other: Self) -> None:
        """As of `draft.Drafters`."""
        raise NotImplementedError(f"{type(self).__name__} declares joins, but has no join method")

    def leave(self, order: Ints) -> None:
        """As of `draft.Drafters`."""
        raise NotImplementedError(f"{type(self).__name__} declares joins, but has no leave method")

    @abstractmethod
    def limits(self, rows: Sequence[int]) -> Mapping[int, int]:
        """Most tokens of the next draft of each of these rows, 0 or more."""

    def draws(self, said: Mapping[int, Sequence[Logits]]) -> Collection[int]:
        """Which of these rows draft a level (more), before any token of it is drawn, by what the drafter says: the
        logits [V] of each place that has no token yet (not to be kept). Only here rows may be compared: what is drawn
        stays. The others wait, and are asked about again beside the next level of these; where none drafts, all drafts
        end.
        """
        return said.keys()

    def keeps(self, drafted: Mapping[int, int]) -> Mapping[int, int]:
        """Of rows' drafts, of so many tokens each, how many of the first the target checks. A drawn token that is left
        out for what it is changes the distribution of samples.
        """
        return drafted

    @abstractmethod
    def more(self, row: int, level: Level, logits: Sequence[Logits]) -> bool:
        """As of `Pace`."""

    @abstractmethod
    def observe(self, row: int, drafted: int, accepted: int) -> None:
        """As of `Pace`."""


class Base(Method, ABC):
    """A method: a frozen dataclass whose fields are its options, shared by all rows. It implements `begin` to decide
    for each row, or `open` to decide for all rows of a session.
    """

    def fit(self, model: Any) -> None:
        """Raises InputError where what it goes by was made for another model than sessions are of (`loop.Model`)."""

    def begin(self, cost: RoundCost) -> Pace:
        """For a new row; a method that remembers nothing is its own."""
        raise NotImplementedError(f"{type(self).__name__} decides for all rows at once; use open")

    def open(self, rows: Sequence[Row], cost: RoundCost) -> Paces:
        """For a list of rows, which others join and leave. `cost`: of a round's call, in plain steps."""
        return _Each([self.begin(cost) for _ in rows])


@dataclass
class _Each(Paces):
    """A pace per row."""

    paces: list[Pace]
    joins = True

    def join(self, other: Self) -> None:
        self.paces += other.paces

    def leave(self, order: Ints) -> None:
        self.paces = picked(self.paces, order)

    def limits(self, rows: Sequence[int]) -> Mapping[int, int]:
        return {i: self.paces[i].limit() for i in rows}

    def more(self, row: int, level: Level, logits: Sequence[Logits]) -> bool:
        return self.paces[row].more(level, logits)

    def observe(self, row: int, drafted: int, accepted: int) -> None:
        self.paces[row].observe(drafted, accepted)
