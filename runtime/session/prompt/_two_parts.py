"""One call of a session in two parts of the model, of which the second runs some tokens: those that were chosen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from accel.ir.entries.blend import EARLY, LATE
from accel.ir.state import POSITIONS
from accel.runtime.call import Arrays, Logits
from accel.runtime.inputs.ints import Bools, Ints
from accel.runtime.session.observers.observer import Calls

Values = npt.NDArray[Any]


class TwoParts:
    """Tokens [B,T], `counts` [B] of them real. late: the state values of the layers of the second part.

    first, total: the tokens [B] of each row before and after. positions: of the call's tokens [B,T]; -1: padding.
    """

    def __init__(self, calls: Calls, late: Sequence[str], tokens: Ints, counts: Ints):
        self.calls, self.tokens, self.counts = calls, tokens, counts
        self.first, self.total = calls.lengths, calls.lengths + counts
        every = np.arange(tokens.shape[1])
        self.positions = np.where(every < counts[:, None], self.first[:, None] + every, -1)
        self.made = 0  # graph calls
        self._late = late

    def early(self, asks: Bools) -> tuple[Values, Values]:
        """All tokens in the first part: what leaves it [B,T,E], and the attention that those which `asks` [B,T] names
        pay to each slot [B,C]; 0 where the entry does not tell.
        """
        self.calls.need([int(self.total.max())])
        stream: Values | None = None
        drawn = np.zeros(self.calls.backend.buffers()[POSITIONS].shape, np.float32)
        chunk = self.calls.chunk
        for start in range(0, int(self.counts.max()), chunk):
            tokens = self.tokens[:, start : start + chunk]
            span = slice(start, start + tokens.shape[1])
            given = {
                "tokens": tokens,
                "positions": self.positions[:, span],
                "slots": self.first + np.minimum(start, self.counts),
                "rows": _places(asks[:, span]),
            }
            out = self._part(EARLY, given)
            if stream is None:
                shape = *self.tokens.shape, out["stream_out"].shape[2]
                stream = np.zeros(shape, out["stream_out"].dtype)
            stream[:, span] = out["stream_out"]
            drawn = drawn + out.get("scores", 0)
        assert stream is not None
        return stream, drawn

    def late(self, at: Sequence[Ints], streams: Sequence[Values]) -> Logits:
        """The tokens at these positions [n] of each row, in order, in the second part, which takes `streams` [n,E]: the
        logits [B,1,V] of the last of each row; 0 where it has none.

        Their slots are emptied, so that nobody reads what these hold; they are written behind all others, and moved.
        """
        left = np.array([one.size for one in at])
        self.calls.need([int((self.total + left.max()).max())])
        self._empty(at)
        positions = np.full((len(at), int(left.max())), -1, np.int64)
        stream = np.zeros((*positions.shape, streams[0].shape[1]), streams[0].dtype)
        for row, (one, values) in enumerate(zip(at, streams, strict=True)):
            positions[row, : one.size], stream[row, : one.size] = one, values
        logits: Logits | None = None
        for start in range(0, positions.shape[1], self.calls.chunk):
            span = slice(start, min(start + self.calls.chunk, positions.shape[1]))
            last = left - 1 - start
            ends = (last >= 0) & (last < span.stop - start)
            given = {
                "stream": stream[:, span],
                "positions": positions[:, span],
                "slots": self.total + np.minimum(start, left),
                "rows": np.where(ends, last, 0)[:, None],
            }
            out = self._part(LATE, given)["logits"]
            logits = np.zeros_like(out) if logits is None else logits
            logits[ends] = out[ends]
        assert logits is not None
        self._move(at)
        return logits

    def give_up(self) -> None:
        """Let rows hold what they held."""
        if (held := self.calls.backend.buffers().get(POSITIONS)) is not None:
            slots = np.arange(held.shape[1])
            held[:] = np.where(slots < self.first[:, None], slots, -1)

    def _empty(self, at: Sequence[Ints]) -> None:
        buffers = self.calls.backend.buffers()
        for row, slots in enumerate(at):
            buffers[POSITIONS][row, slots] = -1

    def _move(self, at: Sequence[Ints]) -> None:
        buffers = self.calls.backend.buffers()
        for row, slots in enumerate(at):
            end = self.total[row]
            for name in self._late:
                array = buffers[name][row]
                array[:, slots] = array[:, end : end + slots.size]
            buffers[POSITIONS][row, slots] = slots
            buffers[POSITIONS][row, end:] = -1

    def _part(self, entry: str, inputs: Arrays) -> Arrays:
        self.made += 1
        return self.calls.backend.part(entry, inputs)


def _places(real: Bools) -> Ints:
    """The columns [B,N] where it holds, at least one column wide; -1: no more."""
    most = max(1, int(real.sum(1).max()))
    found = np.full((len(real), most), -1, np.int64)
    for row, one in enumerate(real):
        places = np.flatnonzero(one)
        found[row, : places.size] = places
    return found
