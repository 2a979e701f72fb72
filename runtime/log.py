"""The tokens that a session's rows hold."""

from __future__ import annotations

import numpy as np

from accel.runtime.ints import Ints

_ROOM = 256


class Log:
    """`ids [B,n]`: those of each row, by position; what lies behind a row's length means nothing."""

    def __init__(self, batch: int):
        self.ids: Ints = np.zeros((batch, _ROOM), np.int64)

    def note(self, tokens: Ints, positions: Ints) -> None:
        """Take a call's tokens [B,T] at these positions; -1 is padding."""
        rows, columns = np.nonzero(positions >= 0)
        places = positions[rows, columns]
        if places.size and int(places.max()) >= self.ids.shape[1]:
            more = np.zeros((len(self.ids), 2 * int(places.max())), np.int64)
            more[:, : self.ids.shape[1]] = self.ids
            self.ids = more
        self.ids[rows, places] = tokens[rows, columns]

    def copy(self) -> Log:
        """One of its own."""
        other = Log(0)
        other.ids = self.ids.copy()
        return other
