"""Plain decoding: one token per row and call. The baseline of every other loop."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from accel.runtime.decode.context import DecodeContext
from accel.runtime.decode.prompts import prompted
from accel.runtime.decode.row import Row
from accel.runtime.loop import Base
from accel.runtime.session.session import Session


@dataclass(frozen=True)
class Autoregressive(Base):
    """One call for all prompts, padded on the right; then one column per call, without the rows that ended."""

    def tokens(
        self, session: Session, rows: list[Row], context: DecodeContext
    ) -> Iterator[tuple[int, int]]:
        live = np.array([not row.finish for row in rows])
        if not live.any():
            return
        logits = prompted(session, rows)
        while True:
            column = np.zeros((len(rows), 1), np.int64)
            for i in np.flatnonzero(live):
                token = rows[i].pick(logits[i, 0])
                rows[i].accept(token, logits[i, 0])
                column[i], live[i] = token, not rows[i].finish
                yield int(i), token
            if not live.any():
                return
            logits = session.run(column, None if live.all() else live.astype(np.int64))
