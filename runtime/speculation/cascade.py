"""A head's session whose modules draft a token each, one after the other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from accel.ir.depth import RUN_LAYERS
from accel.ir.draft_head import DraftHead
from accel.ir.taps import FINAL
from accel.runtime.call import Logits
from accel.runtime.decode.context import Model
from accel.runtime.inputs.ints import Ints
from accel.runtime.session.session import Session
from accel.runtime.speculation.features import Floats, Taps
from accel.runtime.speculation.follow import Follower


class CascadeFollower(Follower):
    """Slot t of module m holds token t + m + 1 and the state of module m - 1 for slot t, of module 0 the target's for
    token t. On its turn a module runs all slots of tokens that the target ran, and that it lacks: those of its turns
    that it was not given, too. Calls run one module, over the slots of that alone.
    """

    def __init__(self, model: Model, target: Session, batch: int, head: DraftHead):
        super().__init__(model, batch)
        self._target, self._head = target, head
        self._held = np.zeros((head.cascade, batch), np.int64)  # slots that each module holds
        self._known = [np.zeros(0, np.int64)] * batch  # tokens that they are of
        self._stop = np.zeros(batch, np.int64)  # slots that a module has at the end of its turn
        self._turn = np.zeros(batch, np.int64)  # of each row the next module
        self._states: list[list[_Slots]] = [
            [_Slots() for _ in range(batch)] for _ in range(head.cascade)
        ]  # what each module reads
        self._taps, self._own = Taps(head.taps, batch), Taps((FINAL,), batch)
        target.listen(self._taps)
        self._session.listen(self._own)

    def close(self) -> None:
        self._target.unlisten(self._taps)
        super().close()

    def slots(self, row: int) -> list[int]:
        """Slots that each module holds of a row."""
        return [int(one) for one in self._held[:, row]]

    def room(self, size: int) -> int:
        """Tokens that a row of `size` tokens may draft."""
        return min(self._head.cascade, self._session.max_context - size)

    def begin(self, rows: Mapping[int, Ints]) -> Logits:
        """The logits [B,1,V] of module 0 behind rows of tokens [n]."""
        modules = np.arange(self._head.cascade)
        for i, ids in rows.items():
            known = self._known[i]
            end = min(known.size, ids.size)
            differs = np.flatnonzero(known[:end] != ids[:end])
            same = int(differs[0]) if differs.size else end
            stands = np.minimum(same - 1 - modules, ids.size - 2)  # the last slot runs in any case
            self._held[:, i] = np.minimum(self._held[:, i], np.maximum(stands, 0))
            for m in range(1, len(modules)):
                self._states[m][i].cut(int(self._held[m - 1, i]))
            self._known[i], self._stop[i], self._turn[i] = ids.copy(), ids.size - 1, 0
        return self._turned(list(rows))

    def said(self, before: Mapping[int, int]) -> Logits:
        """Those of the next module of rows, by the token before."""
        for i, token in before.items():
            self._known[i] = np.append(self._known[i], token)
        return self._turned(list(before))

    def _turned(self, rows: list[int]) -> Logits:
        """The logits [B,1,V] of the next module of each of these rows."""
        session = self._session
        out = np.zeros((session.batch, 1, session.vocab_size), np.float32)
        for m in sorted({int(self._turn[i]) for i in rows}):
            one = [i for i in rows if self._turn[i] == m]
            out[one] = self._ran(m, one)[one]
        self._turn[rows] += 1
        return out

    def _ran(self, m: int, rows: list[int]) -> Logits:
        """Let a module run what it lacks of rows."""
        session, head = self._session, self._head
        starts = session.lengths
        starts[rows] = self._held[m, rows]
        if (starts < session.lengths).any():
            session.rewind(starts)
        counts = np.zeros_like(starts)
        counts[rows] = self._stop[rows] - starts[rows]
        tokens = np.zeros((counts.size, int(counts.max())), np.int64)
        features = np.zeros((*tokens.shape, head.width), np.float32)
        for i in rows:
            start, stop = int(starts[i]), int(self._stop[i])
            tokens[i, : counts[i]] = self._known[i][start + m + 1 : stop + m + 1]
            features[i, : counts[i]] = self._read(m, i, start, stop)
        logits = session.run(
            tokens,
            None if (counts == tokens.shape[1]).all() else counts,
            last_only=True,
            embeds=np.concatenate([self._target.embed(tokens), features], axis=2),
            **{RUN_LAYERS: np.arange(head.cascade) == m},
        )
        for i in rows:
            start, stop = int(starts[i]), int(self._stop[i])
            self._held[m, i] = stop
            if m + 1 < head.cascade:
                self._states[m + 1][i].put(start, self._own.of(i, start, stop))
        return logits

    def _read(self, m: int, row: int, start: int, stop: int) -> Floats:
        """The states [n,W] that a module reads of slots."""
        if not m:
            return self._taps.of(row, start, stop)
        return self._states[m][row].of(start, stop, self._head.cascade)

    def join(self, other: Any) -> None:
        super().join(other)
        other._target.unlisten(other._taps)
        self._taps.join(other._taps)
        self._own.join(other._own)
        self._held = np.concatenate([self._held, other._held], axis=1)
        self._stop = np.concatenate([self._stop, other._stop])
        self._turn = np.concatenate([self._turn, other._turn])
        self._known += other._known
        self._states = [a + b for a, b in zip(self._states, other._states, strict=True)]

    def leave(self, order: Ints) -> None:
        super().leave(order)
        self._taps.leave(order)
        self._own.leave(order)
        self._held, self._stop, self._turn = (
            self._held[:, order],
            self._stop[order],
            self._turn[order],
        )
        self._known = [self._known[i] for i in order]
        self._states = [[states[i] for i in order] for states in self._states]


class _Slots:
    """The states of slots from one on, up to the last that a module gave."""

    def __init__(self) -> None:
        self._first, self._values = 0, np.zeros((0, 0), np.float32)

    def cut(self, stop: int) -> None:
        """Those of slots before `stop` alone."""
        self._values = self._values[: max(stop - self._first, 0)]

    def put(self, start: int, values: Floats) -> None:
        """Those of slots from `start` on [n,W]."""
        self.cut(start)
        if not len(self._values):
            self._first, self._values = start, values
        else:
            self._values = np.concatenate([self._values, values])

    def of(self, start: int, stop: int, back: int) -> Floats:
        """Those of slots `start` .. `stop` - 1 [n,W]; but for `back` of the last, what is before them is forgotten: a
        draft of so many tokens may fall.
        """
        found = self._values[start - self._first : stop - self._first]
        drop = min(max(stop - back - self._first, 0), len(self._values))
        self._first, self._values = self._first + drop, self._values[drop:]
        return found
