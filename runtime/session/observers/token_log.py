"""The tokens that a session's rows hold."""

from __future__ import annotations

import numpy as np

from accel.runtime.inputs.ints import Ints
from accel.runtime.rows import PerRow, Rows

_ROOM = 256


class Log(Rows):
    """`ids [B,n]`: those of each row, by position; what lies behind a row's length means nothing."""

    ids: PerRow

    def __init__(self, batch: int):
        self.ids = np.zeros((batch, _ROOM), np.int64)

    def note(self, tokens: Ints, positions: Ints) -> None:
        """Take a call's tokens [B,T] at these positions; -1 is padding."""
        rows, columns = np.nonzero(positions >= 0)
        places = positions[rows, columns]
        self._reach(int(places.max(initial=-1)))
        self.ids[rows, places] = tokens[rows, columns]

    def put(self, row: int, start: int, tokens: Ints) -> None:
        """Let a row hold these tokens [n] from a position on."""
        self._reach(start + len(tokens))
        self.ids[row, start : start + len(tokens)] = tokens

    def _reach(self, position: int) -> None:
        """Make room for a token there."""
        if position >= self.ids.shape[1]:
            more = np.zeros((len(self.ids), 2 * position), np.int64)
            more[:, : self.ids.shape[1]] = self.ids
            self.ids = more
