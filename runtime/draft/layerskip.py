"""LayerSkip (arXiv:2404.16710): self-speculative decoding; the first layers draft, all layers verify, with
one cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from accel.ir.errors import InputError, RecipeError
from accel.ir.invariants import Invariant
from accel.runtime.backends.protocol import Logits
from accel.runtime.decode.context import DecodeContext
from accel.runtime.decode.row import Row
from accel.runtime.draft import Base, Drafters
from accel.runtime.draft._by_logits import ByLogits
from accel.runtime.session.session import Session

Layers = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class LayerSkip(Base):
    """A drafted token runs the first `exit` layers (0: a quarter), the final norm and the LM head. Its cache
    entries in those layers are rewound and written again by the verification call.
    """

    exit: int = 0

    asks = {"tree": "chain"}
    needs = {"depth": "by-call"}
    relies = frozenset({Invariant.CHAINS, Invariant.LAYERS_BY_CALL})
    provides = frozenset({Invariant.PROBABILITIES})

    def __post_init__(self) -> None:
        if self.exit < 0:
            raise RecipeError(
                f"draft.layerskip: exit is {self.exit}; give the number of draft layers, or 0 for a quarter"
            )

    def open(self, session: Session, rows: Sequence[Row], context: DecodeContext) -> Drafters:
        return _Early(self.layers(context), session, rows, context)

    def layers(self, context: DecodeContext) -> Layers:
        """Which layers draft [L]."""
        depth = None if context.model is None else context.model.facts.depth
        if depth is None:
            raise InputError(
                "draft.layerskip needs a model whose calls can skip layers; build with depth = by-call"
            )
        count = len(depth.plan)
        last = self.exit or max(1, count // 4)
        if not 0 < last < count:
            raise InputError(
                f"draft.layerskip: exit = {last}, but the model has {count} layers; give 1 to {count - 1}, so that "
                "drafting costs less than verification"
            )
        return np.arange(count) < last


class _Early(ByLogits):
    def __init__(
        self, layers: Layers, session: Session, rows: Sequence[Row], context: DecodeContext
    ):
        super().__init__(rows, context, session.vocab_size, float(layers.mean()))  # and the head
        self._layers, self._session = layers, session
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
        return self._session.run(column, mask, run_layers=self._layers)

    def done(self) -> None:
        self._session.rewind(self._held)
