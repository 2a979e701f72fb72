"""Drafts by the first and the last layers of the model, without those in the middle."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from accel.ir.axis import option
from accel.ir.errors import InputError
from accel.ir.invariants import Invariant
from accel.runtime.decode.context import DecodeContext
from accel.runtime.draft import Base
from accel.runtime.draft._by_self import Layers, layers_by_call


@dataclass(frozen=True)
class MidSkip(Base):
    """A draft runs the `first` and the `last` layers, the final norm and the LM head; where both are 0, half of the
    layers, one more of the first than of the last where they are odd.
    """

    first: int = option(0, least=0)
    last: int = option(0, least=0)

    asks = {"tree": "chain"}
    needs = {"depth": "by-call"}
    relies = frozenset({Invariant.CHAINS, Invariant.LAYERS_BY_CALL})
    provides = frozenset({Invariant.PROBABILITIES})

    def layers(self, context: DecodeContext) -> Layers:
        """Which layers draft [L]. Raises InputError."""
        return self.of_layers(layers_by_call(context, self.full_name))

    def of_layers(self, count: int) -> Layers:
        """Which of so many layers draft [L]. Raises InputError."""
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
