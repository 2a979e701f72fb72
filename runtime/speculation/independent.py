"""A head's session that says the next tokens of rows independently, by what the target computed for one token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from accel.ir.draft_head import DraftHead
from accel.runtime.call import Logits
from accel.runtime.decode.context import Model
from accel.runtime.inputs.ints import Ints
from accel.runtime.session.session import Session
from accel.runtime.speculation.features import Taps
from accel.runtime.speculation.follow import BACK, Follower


def by_depth(
    said: npt.NDArray[np.float32],
    rows: Mapping[int, tuple[Ints, npt.NDArray[np.bool_]]],
    count: int,
) -> Logits:
    """The logits [B,count,V] of nodes of trees, of those of each depth [B,D,V], whatever the path. The new nodes of a
    row are equally deep: `rows` as of `Follower.guess`.
    """
    depths = np.zeros(len(said), np.int64)
    for i, (_, mask) in rows.items():
        depths[i] = mask[-1].sum()
    found = said[np.arange(depths.size), depths]
    return np.broadcast_to(found[:, None], (depths.size, count, found.shape[1]))


class IndependentFollower(Follower):
    """Its session holds nothing: one call reads the features of the last token of each row that the target ran, and
    gives the logits of all heads, which stand for every path of a tree.
    """

    opens = 1  # of a prompt the last token is read

    def __init__(self, model: Model, target: Session, batch: int, head: DraftHead):
        super().__init__(model, batch)
        self._target, self._head = target, head
        self._taps = Taps(head.taps, batch)
        self._said = np.zeros((batch, head.independent, self._session.vocab_size), np.float32)
        target.listen(self._taps)

    def close(self) -> None:
        self._target.unlisten(self._taps)
        super().close()

    @property
    def deepest(self) -> int:
        return self._head.independent - 1

    def most(self, size: int, limit: int) -> int:
        return limit

    def ending(self, row: int, known: int) -> None:
        """No prompt is read."""

    def whole(self, row: int) -> None:
        """Nor the whole of one."""

    def follow(self, rows: Mapping[int, Ints], sure: Mapping[int, int] | None = None) -> Logits:
        session = self._session
        counts = np.zeros(session.batch, np.int64)
        features = np.zeros((counts.size, 1, self._head.width), np.float32)
        for i, ids in rows.items():
            counts[i] = 1
            features[i] = self._taps.of(i, ids.size - 2, ids.size - 1)
        tokens = np.zeros((counts.size, 1), np.int64)
        out = session.run(tokens, None if counts.all() else counts, embeds=features)
        session.rewind(np.zeros_like(counts))
        self._said = out.reshape(counts.size, self._head.independent, -1)
        return self._said[:, :1]

    def past(
        self, rows: Mapping[int, Ints], known: Mapping[int, int]
    ) -> dict[int, tuple[int, npt.NDArray[np.float32]]]:
        """What the heads would have said of the newest tokens of rows [n], of which they begin with `known` that nobody
        asks about: the number of the first, and the logits [m,D,V] of all heads for a draft that begins with it, or
        with one of the m - 1 after it. Rows of which nothing is to be said are left out.
        """
        session, starts = self._session, dict[int, int]()
        for i, ids in rows.items():
            start, read = max(known[i], ids.size - BACK) - 2, self._taps.first(i)
            start = max(start, read + (read > 0))  # what was read last has drafted already
            if start < ids.size - 2:
                starts[i] = start
        if not starts:
            return {}
        counts = np.zeros(session.batch, np.int64)
        for i, start in starts.items():
            counts[i] = rows[i].size - 2 - start
        features = np.zeros((counts.size, int(counts.max()), self._head.width), np.float32)
        for i, start in starts.items():
            features[i, : counts[i]] = self._taps.of(i, start, start + int(counts[i]))
        out = session.run(np.zeros(features.shape[:2], np.int64), counts, embeds=features)
        session.rewind(np.zeros_like(counts))
        heads = self._head.independent
        return {
            i: (start + 2, out[i, : counts[i]].reshape(int(counts[i]), heads, -1))
            for i, start in starts.items()
        }

    def guess(
        self, rows: Mapping[int, tuple[Ints, npt.NDArray[np.bool_]]], new: Mapping[int, int]
    ) -> Logits:
        """See Follower."""
        return by_depth(self._said, rows, max(new.values()))

    def join(self, other: Any) -> None:
        super().join(other)
        other._target.unlisten(other._taps)
        self._taps.join(other._taps)
        self._said = np.concatenate([self._said, other._said])

    def leave(self, order: Ints) -> None:
        super().leave(order)
        self._taps.leave(order)
        self._said = self._said[order]
