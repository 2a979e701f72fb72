"""A head's session, whose rows follow those of the target by what it computes."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from accel.ir.draft_head import FEATURES, FUSE, TAPS, DraftHead
from accel.ir.errors import InputError
from accel.runtime.backends.protocol import BackendSession
from accel.runtime.call import Arrays, Logits
from accel.runtime.decode.context import Model
from accel.runtime.decode.rounds import picked
from accel.runtime.inputs.ints import Ints
from accel.runtime.session.observers.observer import CallWatcher
from accel.runtime.session.session import Session
from accel.runtime.speculation.follow import Follower

Floats = npt.NDArray[np.float32]


class Taps(CallWatcher):
    """The outputs of the target, side by side [n,F], for tokens that a head has not read yet and the last that it has:
    of each row from position `first` on, in the parts that calls gave. Calls are sorted by rows when somebody asks.
    """

    def __init__(self, names: Sequence[str], batch: int):
        self._names = tuple(names)
        self._first = [0] * batch
        self._parts: list[list[Floats]] = [[] for _ in range(batch)]
        self._sizes = [0] * batch
        self._calls = list[tuple[Ints, Floats]]()  # positions [B,T] and outputs [B,T,F]

    def before(self, backend: BackendSession, width: int) -> Collection[str]:
        """See CallWatcher."""
        return self._names

    def after(self, tokens: Ints, positions: Ints, extra: Arrays) -> None:
        """See CallWatcher."""
        if extra:
            values = np.concatenate([extra[name] for name in self._names], axis=2)
            self._calls.append((positions.copy(), values))

    def _sort(self) -> None:
        """Give what calls gave to the rows, in their order."""
        for positions, values in self._calls:
            for row, places in enumerate(positions):
                real = np.flatnonzero(places >= 0)
                if real.size:
                    self._put(row, int(places[real[0]]), values[row, real])
        self._calls.clear()

    def _put(self, row: int, start: int, values: Floats) -> None:
        """Values of tokens from a position on; what was known from there on is of tokens that were taken back."""
        parts, keep = self._parts[row], start - self._first[row]
        if not 0 <= keep <= self._sizes[row]:
            parts.clear()
            self._first[row], self._sizes[row], keep = start, 0, 0
        while self._sizes[row] > keep:
            last = parts.pop()
            self._sizes[row] -= len(last)
            if (more := keep - self._sizes[row]) > 0:
                parts.append(last[:more])
                self._sizes[row] = keep
        parts.append(values)
        self._sizes[row] += len(values)

    def first(self, row: int) -> int:
        """The first position of a row that is not forgotten."""
        self._sort()
        return self._first[row]

    def of(self, row: int, start: int, stop: int) -> Floats:
        """Those of positions `start` .. `stop` - 1 [n,F]; what is before the last of them is forgotten. Raises
        InputError where the target never ran one of them in this session.
        """
        self._sort()
        first = self._first[row]
        if start < first or stop - first > self._sizes[row]:
            raise InputError(
                f"the head reads what the target computes for each token, and row {row} holds tokens from {start} on "
                "that this session did not run; decode in a session that ran the whole prompt"
            )
        known = np.concatenate(self._parts[row])
        rest = known[stop - 1 - first :].copy()
        self._first[row], self._parts[row], self._sizes[row] = stop - 1, [rest], len(rest)
        return known[start - first : stop - first]

    def join(self, other: Taps) -> None:
        """Its rows go on behind these."""
        for one in (self, other):
            one._sort()
        self._first += other._first
        self._parts += other._parts
        self._sizes += other._sizes

    def leave(self, order: Ints) -> None:
        """Row i goes on as row order[i]."""
        self._sort()
        self._first = picked(self._first, order)
        self._parts = picked(self._parts, order)
        self._sizes = picked(self._sizes, order)


class FeatureFollower(Follower):
    """Slot t of the head's session holds token t + 1 and the features of token t: those of the target where it ran that
    token, else those that the head gave for it. So a row leaves out its first token, and the slots of guesses run again
    with what the target says. Keys and values of the target (`DraftHead.reads`) are there for tokens that it ran alone.
    """

    opens = sys.maxsize  # all of a prompt: its keys are what the head was trained with

    def __init__(self, model: Model, target: Session, batch: int, trees: bool, head: DraftHead):
        super().__init__(model, batch, trees)
        self._target, self._head = target, head
        self._guessed = slice(head.width - head.reads)  # of features those that the head gives
        self.cut[:] = 1
        self._taps = Taps(head.taps, batch)
        self._next: dict[int, Floats] = {}  # the head's own features behind each row's last token
        self._nodes: dict[
            tuple[int, ...], Floats
        ] = {}  # the same behind nodes of trees, by row and tokens
        target.listen(self._taps)

    def close(self) -> None:
        self._target.unlisten(self._taps)
        super().close()

    def ending(self, row: int, known: int) -> None:
        """All of a prompt is read."""

    def whole(self, row: int) -> None:
        """It is already."""

    def _kept(self, rows: Mapping[int, Ints]) -> Ints:
        """Take back what the head only guessed; the last token runs again where nothing new came."""
        keep = self._session.lengths
        for i, ids in rows.items():
            keep[i] = min(int(self._sure[i]), ids.size - 1)
        if (keep < self._session.lengths).any():
            self._session.rewind(keep)
        return keep

    def run(self, rows: Mapping[int, Ints], prompt: bool = False, last_only: bool = True) -> Logits:
        session, held = self._session, self._session.lengths
        counts = np.zeros_like(held)
        for i, ids in rows.items():
            counts[i] = ids.size
        tokens = np.zeros((len(counts), int(counts.max())), np.int64)
        features = np.zeros((*tokens.shape, self._head.width), np.float32)
        ran = self._target.lengths
        for i, ids in rows.items():
            start, stop = int(held[i]), int(held[i]) + ids.size
            self._log.put(i, start, ids)
            tokens[i, : ids.size] = ids
            if start < ran[i]:
                features[i, : ids.size] = self._fused(i, start, stop)
            else:
                features[i, 0, self._guessed] = self._next[i]
        lengths = None if (counts == tokens.shape[1]).all() else counts
        out = session.run(
            tokens, lengths, last_only=last_only, embeds=self._embedded(tokens, features)
        )
        for i, ids in rows.items():
            self._next[i] = out[i, 0 if last_only else ids.size - 1, session.vocab_size :]
            self._nodes = {}
        return out

    def guess(
        self, rows: Mapping[int, tuple[Ints, npt.NDArray[np.bool_]]], new: Mapping[int, int]
    ) -> Logits:
        session = self._session
        counts, wanted = np.zeros((2, session.batch), np.int64)
        for i, (ids, _) in rows.items():
            counts[i], wanted[i] = ids.size, new[i]
        width, most = int(counts.max()), int(wanted.max())
        columns = np.minimum((counts - wanted)[:, None] + np.arange(most), width - 1)
        tokens = np.zeros((counts.size, width), np.int64)
        features = np.zeros((*tokens.shape, self._head.width), np.float32)
        tree = np.tile(np.eye(width, dtype=np.bool_), (counts.size, 1, 1))
        paths: dict[int, list[tuple[int, ...]]] = {}
        for i, (ids, mask) in rows.items():
            tokens[i, : ids.size], tree[i, : ids.size, : ids.size] = ids, mask
            paths[i] = [(i, *ids[seen].tolist()) for seen in mask]
            for n, path in enumerate(paths[i]):
                last = self._next[i] if len(path) == 2 else self._nodes[path[:-1]]
                features[i, n, self._guessed] = last
        embeds = self._embedded(tokens, features)
        out = session.guess(tokens, tree, counts, columns, embeds=embeds)
        for i, count in new.items():
            for n, path in enumerate(paths[i][-count:]):
                self._nodes[path] = out[i, n, session.vocab_size :]
        return out

    def _fused(self, row: int, start: int, stop: int) -> Floats:
        """The features of tokens of the target [n,W]."""
        taps = self._taps.of(row, start, stop)
        if not self._head.fused:
            return taps
        found: Floats = self._session.entry(FUSE, {TAPS: taps[None]})[FEATURES][0]
        return found

    def _embedded(self, tokens: Ints, features: Floats) -> Floats:
        """What a call gives of tokens [B,T]."""
        if not self._head.embedding:
            return features
        return np.concatenate([self._target.embed(tokens), features], axis=2)

    def join(self, other: Any) -> None:
        count = len(self.cut)
        super().join(other)
        other._target.unlisten(other._taps)
        self._taps.join(other._taps)
        self._next |= {i + count: one for i, one in other._next.items()}
        self._nodes = {}

    def leave(self, order: Ints) -> None:
        super().leave(order)
        self._taps.leave(order)
        self._next = {i: self._next[k] for i, k in enumerate(order.tolist()) if k in self._next}
        self._nodes = {}
