"""S3D (arXiv:2405.20314), its layer skipping: self-speculative decoding; the first and the last layers draft, without
those in the middle, and all layers verify, with one cache.
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
class S3dMidskip(Base):
    """A drafted token runs the `first` and the `last` layers, the final norm and the LM head; where both are 0, half of
    the layers, one more of the first than of the last where they are odd.

    The recipe gets `depth = by-call`, which makes each layer conditional and skips none by default.
    """

    first: int = option(0, least=0)
    last: int = option(0, least=0)

    lacks = "the trained mask tokens, by which one pass drafts several tokens"
    asks = {"tree": "chain"}
    needs = {"depth": "by-call"}
    relies = frozenset({Invariant.CHAINS, Invariant.LAYERS_BY_CALL})
    provides = frozenset({Invariant.PROBABILITIES})

    def open(self, session: Session, rows: Sequence[Row], context: DecodeContext) -> Drafters:
        layers = self.layers(context)
        return BySelf(
            session, rows, context, cost_of(context, float(layers.mean())), run_layers=layers
        )

    def layers(self, context: DecodeContext) -> Layers:
        """Which layers draft [L]. Raises InputError."""
        count = layers_by_call(context, self.full_name)
        first, last = self.first, self.last
        if not first + last:
            half = max(1, round(count / 2))
            first, last = half - half // 2, half // 2
        if first + last > count:
            raise InputError(
                f"{self.full_name}: first = {first} and last = {last}, but the model has {count} layers; give fewer"
            )
        number = np.arange(count)
        return (number < first) | (number >= count - last)
