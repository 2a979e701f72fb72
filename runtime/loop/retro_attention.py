"""RetroAttention (arXiv:2508.09001): each call runs the last tokens again, which then attend to more."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from accel.ir.axis import option
from accel.ir.invariants import Invariant
from accel.ir.sizes import FEW
from accel.runtime.decode.context import DecodeContext
from accel.runtime.decode.prompts import prompted
from accel.runtime.decode.row import Row
from accel.runtime.loop import Base, check_rows
from accel.runtime.session.session import Session


@dataclass(frozen=True)
class RetroAttention(Base):
    """One token per row and call, and the `window` - 1 generated tokens before it again: their keys and values are
    written anew. With `kv.select = retro-attention` these come of attention over what later tokens chose, too. Tokens
    that were given out stay; those of a prompt, which read everything, are not run again. `window` = 1 is
    `autoregressive`.
    """

    window: int = option(2, least=1, most=FEW)

    relies = frozenset({Invariant.REWIND, Invariant.LATER_READS})
    grade = "approximate"

    def tokens(
        self, session: Session, rows: list[Row], context: DecodeContext
    ) -> Iterator[tuple[int, int]]:
        live = np.array([not row.finish for row in rows])
        if not live.any():
            return
        logits = prompted(session, rows)
        columns = np.zeros((len(rows), 0), np.int64)  # the newest tokens that the session holds
        while True:
            new, taken = np.zeros((len(rows), 1), np.int64), list[tuple[int, int]]()
            for i in np.flatnonzero(live).tolist():
                try:
                    token = rows[i].pick(logits[i, 0])
                    rows[i].accept(token, logits[i, 0])
                except Exception as error:
                    rows[i].fail(error)
                else:
                    taken.append((i, token))
                    new[i], live[i] = token, not rows[i].finish
            yield from taken
            check_rows(rows)
            if not live.any():
                return
            again = self._again(session, live, columns.shape[1])
            if again:
                session.rewind(session.lengths - again * live)
            columns = np.concatenate((columns[:, columns.shape[1] - again :], new), axis=1)
            counts = None if live.all() else live * columns.shape[1]
            logits = session.run(columns, counts, last_only=True)

    def _again(self, session: Session, live: np.ndarray, most: int) -> int:
        """Tokens before the newest that every row can run again: no more than are behind what was evicted."""
        free = (session.lengths - session.held_from)[live].min()
        return int(max(0, min(self.window - 1, most, free)))
