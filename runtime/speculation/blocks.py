"""A head's session that drafts a block in one call behind what the target computed for the text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from accel.ir.draft_head import FEATURES, FUSE, TAPS, DraftHead
from accel.runtime.call import Logits
from accel.runtime.decode.context import Model
from accel.runtime.inputs.ints import Ints
from accel.runtime.session.session import Session
from accel.runtime.speculation.features import Taps
from accel.runtime.speculation.follow import Follower


class BlockFollower(Follower):
    """Slot t of the head's session holds the features of token t, of all tokens of a row but the last. A block behind
    them is the last token and masks, which see each other and say their place in it; it is dropped after its call.
    """

    def __init__(self, model: Model, target: Session, batch: int, head: DraftHead):
        super().__init__(model, batch, trees=True)
        self._target, self._head = target, head
        self._first = 0 if head.anchored else 1  # of a block's tokens, which says a drafted one
        self._taps = Taps(head.taps, batch)
        target.listen(self._taps)

    def close(self) -> None:
        self._target.unlisten(self._taps)
        super().close()

    def room(self, size: int) -> int:
        """Tokens that a row of `size` tokens may draft."""
        return min(self._tokens(size) - self._first, self._session.max_context - size)

    def _tokens(self, size: int) -> int:
        """Those of a block behind a row of `size` tokens."""
        return min(self._head.block, self._session.max_context - size + 1)

    def draft(self, rows: Mapping[int, Ints], most: int) -> Logits:
        """The logits [B,n,V] of the first `most` tokens of a block behind rows of tokens [n], and what lies behind."""
        session, head = self._session, self._head
        self._read(rows)
        counts = np.zeros(session.batch, np.int64)
        for i, ids in rows.items():
            counts[i] = self._tokens(ids.size)
        width = int(counts.max())
        tokens = np.full((counts.size, width), head.mask, np.int64)
        tree = np.tile(np.eye(width, dtype=np.bool_), (counts.size, 1, 1))
        for i, ids in rows.items():
            tokens[i, 0], tree[i, : counts[i], : counts[i]] = ids[-1], True
        embeds = np.zeros((*tokens.shape, head.embedding + head.width), np.float32)
        if head.embedding:
            embeds[:, :, : head.embedding] = self._target.embed(tokens)
        embeds[:, :, -1] = -np.arange(width)
        columns = np.tile(self._first + np.arange(most), (counts.size, 1))
        places = session.lengths[:, None] + np.arange(width)
        return session.guess(tokens, tree, counts, columns, places, embeds=embeds)

    def _read(self, rows: Mapping[int, Ints]) -> None:
        """Hold the features of all tokens of rows but the last."""
        session, head, start = self._session, self._head, self._session.lengths
        counts = np.zeros_like(start)
        for i, ids in rows.items():
            counts[i] = ids.size - 1 - start[i]
        if not counts.any():
            return
        embeds = np.zeros((counts.size, int(counts.max()), head.embedding + head.width), np.float32)
        for i in np.flatnonzero(counts).tolist():
            stop = int(start[i] + counts[i])
            embeds[i, : counts[i], head.embedding :] = self._features(i, int(start[i]), stop)
        tokens = np.zeros(embeds.shape[:2], np.int64)
        lengths = None if (counts == tokens.shape[1]).all() else counts
        session.run(tokens, lengths, embeds=embeds)

    def _features(self, row: int, start: int, stop: int) -> npt.NDArray[np.float32]:
        """Those of tokens of the target [n,W]."""
        taps = self._taps.of(row, start, stop)
        if not self._head.fused:
            return taps
        found: npt.NDArray[np.float32] = self._session.entry(FUSE, {TAPS: taps[None]})[FEATURES][0]
        return found

    def join(self, other: Any) -> None:
        super().join(other)
        other._target.unlisten(other._taps)
        self._taps.join(other._taps)

    def leave(self, order: Ints) -> None:
        super().leave(order)
        self._taps.leave(order)
