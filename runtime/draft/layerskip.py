"""LayerSkip (arXiv:2404.16710): self-speculative decoding; the first layers draft, all layers verify, with
one cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from accel.ir.axis import option
from accel.ir.errors import InputError
from accel.ir.invariants import Invariant
from accel.runtime.decode.context import DecodeContext
from accel.runtime.decode.row import Row
from accel.runtime.draft import Base, Drafters
from accel.runtime.draft._by_self import BySelf, Layers, cost_of, layers_by_call
from accel.runtime.session.session import Session


@dataclass(frozen=True)
class LayerSkip(Base):
    """A drafted token runs the first `exit` layers (0: a quarter), the final norm and the LM head. Its cache
    entries in those layers are rewound and written again by the verification call.

    The recipe gets `depth = by-call`, which makes each layer conditional and skips none by default.
    """

    exit: int = option(0, least=0)

    asks = {"tree": "chain"}
    needs = {"depth": "by-call"}
    relies = frozenset({Invariant.CHAINS, Invariant.LAYERS_BY_CALL})
    provides = frozenset({Invariant.PROBABILITIES})

    def open(self, session: Session, rows: Sequence[Row], context: DecodeContext) -> Drafters:
        layers = self.layers(context)
        cost = cost_of(context, float(layers.mean()))
        return BySelf(session, rows, context, cost, run_layers=layers)

    def layers(self, context: DecodeContext) -> Layers:
        """Which layers draft [L]."""
        count = layers_by_call(context, self.full_name)
        last = self.exit or max(1, count // 4)
        if not 0 < last < count:
            raise InputError(
                f"draft.layerskip: exit = {last}, but the model has {count} layers; give 1 to {count - 1}, so that "
                "drafting costs less than verification"
            )
        return np.arange(count) < last
