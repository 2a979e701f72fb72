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
    in `observe`, or say something else of each row (`says`); all calls of a row's draft say the same, or layers that
    one of them left out would lack its tokens.
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
        self._saying: dict[int, Mapping[str, Any]] = {}  # of each row that drafts
        self._held = session.lengths

    def says(self, row: int) -> Mapping[str, Any]:
        """What the calls of a row's next draft say. Rows of which it is the same object run together."""
        return self.less

    def first(self, rows: list[int]) -> Logits:
        self._held = self._session.lengths
        self._saying = {i: self.says(i) for i in rows}
        return self.further({i: int(self.rows[i].seen[-1]) for i in rows})

    def further(self, tokens: dict[int, int]) -> Logits:
        together: dict[int, dict[int, int]] = {}
        for i, token in tokens.items():
            together.setdefault(id(self._saying[i]), {})[i] = token
        first, *others = (self._called(part) for part in together.values())
        for part, logits in zip(list(together.values())[1:], others, strict=True):
            first[list(part)] = logits[list(part)]
        return first

    def _called(self, tokens: dict[int, int]) -> Logits:
        """The logits [B,1,V] after a token of each of some rows that say the same; of others anything."""
        batch = self._session.batch
        column = np.zeros((batch, 1), np.int64)
        column[list(tokens), 0] = list(tokens.values())
        mask = None
        if len(tokens) < batch:
            mask = np.zeros(batch, np.int64)
            mask[list(tokens)] = 1
        return self._session.run(column, mask, **self._saying[next(iter(tokens))])

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
