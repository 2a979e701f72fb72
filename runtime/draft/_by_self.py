"""Drafters that are the target itself, run for less: one session, whose cache keeps nothing of a draft."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from accel.runtime.call import Logits
from accel.runtime.decode.context import DecodeContext
from accel.runtime.decode.row import Row
from accel.runtime.draft._by_logits import ByLogits
from accel.runtime.session.session import Session


class BySelf(ByLogits):
    """A token per call of the target's session; the draft is rewound, and the verification call writes it again."""

    joins = True  # it drafts for all rows of the target's session, whatever these are

    def __init__(
        self,
        session: Session,
        rows: Sequence[Row],
        context: DecodeContext,
        draft_cost: float,
        **less: Any,
    ):
        """`less`: what its calls say beside tokens (`Session.run`)."""
        super().__init__(rows, context, session.vocab_size, draft_cost)
        self._session, self._less = session, less
        self._held = session.lengths

    def first(self, rows: list[int]) -> Logits:
        self._held = self._session.lengths
        return self.further({i: int(self.rows[i].seen[-1]) for i in rows})

    def further(self, tokens: dict[int, int]) -> Logits:
        batch = self._session.batch
        column = np.zeros((batch, 1), np.int64)
        column[list(tokens), 0] = list(tokens.values())
        mask = None
        if len(tokens) < batch:
            mask = np.zeros(batch, np.int64)
            mask[list(tokens)] = 1
        return self._session.run(column, mask, **self._less)

    def done(self) -> None:
        self._session.rewind(self._held)
