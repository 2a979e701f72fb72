"""NAME (paper, arXiv): what it does, in a sentence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from accel.runtime.decode.context import DecodeContext
from accel.runtime.decode.rounds import Rounds
from accel.runtime.decode.row import Row
from accel.runtime.loop import Base
from accel.runtime.session.session import Session


@dataclass(frozen=True)
class Template(Base):
    """How calls become tokens: here, one token per row and call."""

    def rounds(self, session: Session, rows: Sequence[Row], context: DecodeContext) -> Rounds:
        return _Rounds(session, rows)


class _Rounds(Rounds):
    joins = True  # it remembers nothing of a row

    def run(self) -> list[tuple[int, int]]:
        live = self.live
        return list(self._pick(live, self._call(live)))
