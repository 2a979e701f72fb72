"""A head's session that drafts a block, whose places a small head walks over."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from accel.ir.draft_head import (
    BIAS,
    CANDIDATES,
    CONFIDENCE,
    HIDDEN,
    MARKOV,
    NEXT_STATE,
    STATE,
    DraftHead,
)
from accel.runtime.call import Logits
from accel.runtime.decode.context import Model
from accel.runtime.inputs.ints import Ints
from accel.runtime.session.session import Session
from accel.runtime.speculation.blocks import BlockFollower


class WalkFollower(BlockFollower):
    """What a block says of each place changes with the token before: `said` of one place after the other."""

    def __init__(self, model: Model, target: Session, batch: int, head: DraftHead):
        super().__init__(model, target, batch, head)
        self._block = np.zeros((batch, 0, 0), np.float32)  # what it says of all places
        self._place = np.zeros(batch, np.int64)  # of each row, the next
        self._state = np.zeros((batch, head.state), np.float32)
        self.confidence = np.full(batch, np.inf, np.float32)  # of each row's last place

    def begin(self, rows: Mapping[int, Ints]) -> Logits:
        """Draft a block behind rows of tokens [n]: the logits [B,1,V] of its first place."""
        self._block = self.draft(rows, max(self.room(ids.size) for ids in rows.values()))
        self._place[:], self._state[:] = 0, 0
        return self.said({i: int(ids[-1]) for i, ids in rows.items()})

    def said(self, before: Mapping[int, int]) -> Logits:
        """The logits [B,1,V] of the next place of rows, by the token before; of what is no candidate minus infinity."""
        which, head = list(before), self._head
        places = self._block[which, self._place[which]]
        logits, hidden = np.split(places, [places.shape[1] - head.hidden], axis=1)
        inputs: dict[str, Any] = {"tokens": np.array(list(before.values()), np.int64)[:, None]}
        if head.hidden:
            inputs[HIDDEN] = hidden[:, None]
        if head.state:
            inputs[STATE] = self._state[which, None]
        if head.candidates:
            likeliest = np.argpartition(logits, -head.candidates)[:, -head.candidates :]
            inputs[CANDIDATES] = likeliest[:, None]
        found = self._session.entry(MARKOV, inputs)
        if head.state:
            self._state[which] = found[NEXT_STATE][:, 0]
        if head.confident:
            self.confidence[which] = found[CONFIDENCE][:, 0, 0]
        self._place[which] += 1
        out = np.zeros((len(self._block), 1, logits.shape[1]), np.float32)
        bias = found[BIAS][:, 0]
        if head.candidates:
            added, bias = bias, np.full_like(logits, -np.inf)
            np.put_along_axis(bias, likeliest, added, 1)
        out[which, 0] = logits + bias
        return out

    def join(self, other: Any) -> None:
        super().join(other)
        self._clear()

    def leave(self, order: Ints) -> None:
        super().leave(order)
        self._clear()

    def _clear(self) -> None:
        """No row is within a block."""
        batch = self._session.batch
        self._place, self.confidence = np.zeros(batch, np.int64), np.full(batch, np.inf, np.float32)
        self._state = np.zeros((batch, self._head.state), np.float32)
