"""A head's session that drafts token by token from one place, over keys of its target alone."""

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
from accel.runtime.speculation.blocks import BlockFollower


class ConstantFollower(BlockFollower):
    """Slot t of the head's session holds keys and values of token t, of all tokens of a row but the last. A query is a
    guess behind them, which has none: it reads a token's embedding and the hidden state of the token before, the
    target's or its own, always in the place of the row's last token.
    """

    def __init__(self, model: Model, target: Session, batch: int, head: DraftHead):
        super().__init__(model, target, batch, head)
        self._hidden = np.zeros((batch, head.hidden), np.float32)  # before each row's next token
        self._ran = np.zeros((batch, head.hidden), np.float32)  # of the last that the target ran

    def room(self, size: int) -> int:
        """A row of one token has nothing before it."""
        return 0 if size < 2 else self._session.max_context - size

    def begin(self, rows: Mapping[int, Ints]) -> Logits:
        """Draft behind rows of tokens [n]: the logits [B,1,V] of the first."""
        self._read(rows)
        self._hidden[:] = self._ran
        return self.said({i: int(ids[-1]) for i, ids in rows.items()})

    def said(self, before: Mapping[int, int]) -> Logits:
        """The logits [B,1,V] of the next token of rows, by the one before."""
        session, head = self._session, self._head
        tokens = np.zeros((session.batch, 1), np.int64)
        counts = np.zeros(session.batch, np.int64)
        for i, token in before.items():
            tokens[i], counts[i] = token, 1
        embeds = np.zeros((*tokens.shape, head.embedding + head.width), np.float32)
        embeds[:, :, : head.embedding] = self._target.embed(tokens)
        embeds[:, 0, head.embedding : head.embedding + head.hidden] = self._hidden
        tree = np.ones((session.batch, 1, 1), np.bool_)
        columns, places = np.zeros_like(tokens), session.lengths[:, None]
        out = session.guess(tokens, tree, counts, columns, places, embeds=embeds)
        which = list(before)
        self._hidden[which] = out[which, 0, -head.hidden :]
        logits: Logits = out[:, :, : -head.hidden]
        return logits

    def _features(self, row: int, start: int, stop: int) -> npt.NDArray[np.float32]:
        found = super()._features(row, start, stop)
        self._ran[row] = found[-1, : self._head.hidden]
        return found

    def join(self, other: Any) -> None:
        super().join(other)
        self._hidden = np.concatenate([self._hidden, other._hidden])
        self._ran = np.concatenate([self._ran, other._ran])

    def leave(self, order: Ints) -> None:
        super().leave(order)
        self._hidden, self._ran = self._hidden[order], self._ran[order]
