"""Rows that are decoded together, a round at a time; others may join, and rows may leave."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, Self, TypeVar

import numpy as np

from accel.ir.errors import InputError
from accel.runtime.call import Logits
from accel.runtime.decode.prompts import prompted
from accel.runtime.decode.row import Row
from accel.runtime.inputs.ints import Ints
from accel.runtime.session.session import Session

_FIGURES = ("drafted", "accepted", "rounds", "fallback")  # of a row that drafts, see `Meter.stats`
T = TypeVar("T")


class Rounds(ABC):
    """The rounds of a group of rows.

    A row that raises an error fails alone: `Row.error`, and it is no longer live. What the call of a round raises is of
    all rows; the session is then as it was, or closed.
    """

    def __init__(self, session: Session, rows: Sequence[Row]):
        self._session, self._rows = session, list(rows)  # one list for good

    @property
    def session(self) -> Session:
        """The session of the rows."""
        return self._session

    @property
    def rows(self) -> Sequence[Row]:
        """Row i is row i of the session."""
        return self._rows

    @property
    def live(self) -> list[int]:
        """The rows that run."""
        return [i for i, row in enumerate(self._rows) if not row.finish]

    @property
    def joins(self) -> bool:
        """Whether the loop lets rows of others join. The session must also allow it (`capabilities.joins`)."""
        return False

    @property
    def widest(self) -> int:
        """Most tokens that a round adds to a row."""
        return 1

    def start(self) -> Iterator[tuple[int, int]]:
        """Run the prompts of all rows that run, behind the tokens of them that the session holds, and let each row take
        a token: (row, token).
        """
        if live := self.live:
            yield from self._pick(live, prompted(self._session, self._rows))

    @abstractmethod
    def run(self) -> list[tuple[int, int]]:
        """A round of the rows that run: (row, token) of all that they took, which the session then holds but for each
        row's last.
        """

    def join(self, other: Self) -> None:
        """The rows of `other`, which is of the same loop and context over another session of the model, go on behind
        these. It must not be used any more. Raises InputError; nothing has changed then.
        """
        if not self.joins:
            raise InputError(
                "rows cannot join rounds of this loop and its drafter (Rounds.joins); run them in rounds of their own"
            )
        self._session.join(other._session)
        self._rows += other._rows
        self.joined(other)

    def joined(self, other: Self) -> None:  # noqa: B027
        """The sessions and the rows have joined; the loop's own state of each row is to follow."""

    def leave(self, rows: Any) -> None:
        """Drop rows, an int or [n], not all of them; the last ones take their places, as in `Session.leave`."""
        order = self._session.leave(rows)
        self.left(order)
        self._rows[:] = picked(self._rows, order)  # in place: drafters have this list, too

    def left(self, order: Ints) -> None:  # noqa: B027
        """Row i goes on as row order[i] was; `rows` are still those before. The loop's own state is to follow."""

    def close(self) -> None:  # noqa: B027
        """Free what the loop holds beside the session, which stays open."""

    def _call(self, live: Sequence[int]) -> Logits:
        """Run the newest token of each of these rows: the logits [B,1,V], which may lie on a device."""
        column = np.zeros((len(self._rows), 1), np.int64)
        column[live, 0] = [self._rows[i].tokens[-1] for i in live]
        if len(live) == len(self._rows):
            return self._session.run(column, here=False)
        counts = np.zeros(len(self._rows), np.int64)
        counts[live] = 1
        return self._session.run(column, counts, here=False)

    def _pick(self, live: Sequence[int], logits: Logits) -> Iterator[tuple[int, int]]:
        """Let each of these rows take the token that it picks from logits [B,1,V]: (row, token)."""
        for i in live:
            row = self._rows[i]
            try:
                token = row.pick(logits[i, 0])
                row.accept(token, logits[i, 0])
            except Exception as error:
                row.fail(error)
            else:
                yield i, token


def picked(values: Sequence[T], order: Ints) -> list[T]:
    """What rows that stay have of what each row had."""
    return [values[i] for i in order]


def begin_figures(rows: Sequence[Row]) -> None:
    """These rows are of a loop that drafts: theirs count from 0 on."""
    for row in rows:
        row.drafting.update(dict.fromkeys(_FIGURES, 0))
