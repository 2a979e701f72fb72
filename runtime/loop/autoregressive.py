"""Plain decoding: one token per row and call. The baseline of every other loop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from accel.runtime.decode.context import DecodeContext
from accel.runtime.decode.rounds import Rounds
from accel.runtime.decode.row import Row
from accel.runtime.loop import Base
from accel.runtime.session.session import Session


@dataclass(frozen=True)
class Autoregressive(Base):
    """One call for all prompts, padded on the right; then one column per call, without the rows that ended."""

    def rounds(self, session: Session, rows: Sequence[Row], context: DecodeContext) -> Rounds:
        return _Rounds(session, rows)


class _Rounds(Rounds):
    joins = True

    def run(self) -> list[tuple[int, int]]:
        live = self.live
        return list(self._pick(live, self._call(live)))
