"""SpeCache's steps (arXiv:2503.16163): a guess of the next token runs beside each token, and asks for what it reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from accel.ir.invariants import Invariant
from accel.runtime.call import Logits
from accel.runtime.decode.context import DecodeContext
from accel.runtime.decode.rounds import Rounds, picked
from accel.runtime.decode.row import Row
from accel.runtime.inputs.ints import Ints
from accel.runtime.loop import Base
from accel.runtime.session.session import Session


@dataclass(frozen=True)
class Specache(Base):
    """A call of two tokens of each row: its newest, whose logits give the next token, and a guess of that. The guess
    leaves what it asks for (`kv.select = specache`, `guess`) and its logits, of which the best token is guessed next;
    its keys and values are dropped. The first guess runs by itself. A wrong guess changes what the next token reads
    exactly, and nothing else; where a model asks for nothing ahead, tokens are those of `autoregressive`.
    """

    relies = frozenset({Invariant.REWIND})

    def rounds(self, session: Session, rows: Sequence[Row], context: DecodeContext) -> Rounds:
        return _Rounds(session, rows)


class _Rounds(Rounds):
    joins = True

    def __init__(self, session: Session, rows: Sequence[Row]):
        super().__init__(session, rows)
        self._guesses = [-1] * len(self._rows)  # of the token behind each row's newest, -1: none

    def run(self) -> list[tuple[int, int]]:
        live, session = self.live, self._session
        free = (session.room >= 2) & (session.lengths + 2 <= session.max_context)
        if new := [i for i in live if self._guesses[i] < 0 and free[i]]:
            before = session.lengths  # of these the newest runs alone first, for a guess
            logits, _ = self._fed(new, {})
            session.rewind(before)
            self._guess({i: logits[i, 0] for i in new})
        pairs = {i: self._guesses[i] for i in live if self._guesses[i] >= 0 and free[i]}
        logits, counts = self._fed(live, pairs)
        session.rewind(session.lengths - np.maximum(counts - 1, 0))
        self._guesses = [-1] * len(self._rows)
        self._guess({i: logits[i, 1] for i in pairs})
        return list(self._pick(live, logits))

    def _fed(self, live: Sequence[int], pairs: Mapping[int, int]) -> tuple[Logits, Ints]:
        """Run the newest token of these rows, and beside it a guess: logits [B,T,V], and tokens of each row [B]."""
        shape = len(self._rows), 2 if pairs else 1
        tokens, counts = np.zeros(shape, np.int64), np.zeros(len(self._rows), np.int64)
        for i in live:
            tokens[i, 0], counts[i] = self._rows[i].tokens[-1], 1
        for i, guess in pairs.items():
            tokens[i, 1], counts[i] = guess, 2
        return self._session.run(tokens, counts), counts

    def _guess(self, logits: Mapping[int, Logits]) -> None:
        """The best token behind the logits [V] of a row is guessed next."""
        for i, each in logits.items():
            self._guesses[i] = int(each.argmax())

    def joined(self, other: _Rounds) -> None:
        self._guesses += other._guesses

    def left(self, order: Ints) -> None:
        self._guesses = picked(self._guesses, order)
