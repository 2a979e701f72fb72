"""Drafters that are the target itself, run for less: one session, whose cache keeps nothing of a draft; and what that
costs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from accel.ir.errors import InputError
from accel.runtime.call import Logits
from accel.runtime.decode.context import DecodeContext
from accel.runtime.decode.row import Row
from accel.runtime.draft._by_logits import ByLogits
from accel.runtime.session.session import Session

Layers = npt.NDArray[np.bool_]


class BySelf(ByLogits):
    """A token per call of the target's session; the draft is rewound, and the verification call writes it again.

    `less`: what its calls say beside tokens (`Session.run`). A subclass may change it between drafts, by what it hears
    in `observe`; all calls of a draft say the same, or layers that one of them left out would lack its tokens.
    """

    joins = True  # it drafts for all rows of the target's session, whatever these are

    def __init__(
        self,
        session: Session,
        rows: Sequence[Row],
        context: DecodeContext,
        draft_cost: float,
        **less: Any,
    ):
        super().__init__(rows, context, session.vocab_size, draft_cost)
        self._session = session
        self.less: Mapping[str, Any] = less
        self._says = self.less
        self._held = session.lengths

    def first(self, rows: list[int]) -> Logits:
        self._held, self._says = self._session.lengths, dict(self.less)
        return self.further({i: int(self.rows[i].seen[-1]) for i in rows})

    def further(self, tokens: dict[int, int]) -> Logits:
        batch = self._session.batch
        column = np.zeros((batch, 1), np.int64)
        column[list(tokens), 0] = list(tokens.values())
        mask = None
        if len(tokens) < batch:
            mask = np.zeros(batch, np.int64)
            mask[list(tokens)] = 1
        return self._session.run(column, mask, **self._says)

    def done(self) -> None:
        self._session.rewind(self._held)


def layers_by_call(context: DecodeContext, name: str) -> int:
    """The layers of the model that a drafter `name` runs in part. Raises InputError where no call chooses layers."""
    depth = None if context.model is None else context.model.facts.depth
    if depth is None:
        raise InputError(
            f"{name} needs a model whose calls can skip layers; build with depth = by-call"
        )
    return len(depth.plan)


def cost_of(context: DecodeContext, share: float) -> float:
    """What a drafted token costs, in plain steps, that runs this share of the layers, and the head, as far as is known
    before: by numbers of weights, the model being as wide as its queries.
    """
    if context.model is None:
        return share
    facts = context.model.facts
    width = max((one.num_heads * one.head_dim for one in facts.layers), default=0)
    head = min(1.0, facts.vocab_size * width / max(1, facts.parameters))
    return share + (1 - share) * head
