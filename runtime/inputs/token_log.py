"""The tokens that a session's rows hold."""

from __future__ import annotations

import numpy as np

from accel.runtime.inputs.ints import Ints
from accel.runtime.inputs.stack import stacked

_ROOM = 256


class Log:
    """`ids [B,n]`: those of each row, by position; what lies behind a row's length means nothing."""

    def __init__(self, batch: int):
        self.ids: Ints = np.zeros((batch, _ROOM), np.int64)

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

    def select(self, rows: Ints) -> None:
        """Hold the tokens of these rows [n]."""
        self.ids = self.ids[rows]

    def join(self, other: Log) -> None:
        """Hold the tokens of its rows behind these."""
        self.ids = stacked(self.ids, other.ids)

    def copy(self) -> Log:
        """One of its own."""
        other = Log(0)
        other.ids = self.ids.copy()
        return other
