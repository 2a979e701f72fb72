"""Entropy-bounded unmasking (EB-Sampler, arXiv:2505.24857): as many tokens as may be drawn apart from each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from accel.ir.axis import option
from accel.runtime.loop._blocks import Blocks
from accel.runtime.loop._canvas import Guess, Place

ORDERS = ("entropy", "confidence", "margin")


@dataclass(frozen=True)
class DllmEb(Blocks):
    """The most masks, in the `order` of their entropy, confidence or margin, whose entropies sum to at most `gamma`
    nats beside the largest of them: a bound of what is lost by drawing them as if they were independent.

    One mask always stays. `gamma` = 0 adds those of entropy 0 alone.
    """

    gamma: float = option(0.1, least=0)
    order: str = option("entropy", one_of=ORDERS)

    def stays(self, guess: Guess, place: Place) -> Any:
        by = {"entropy": guess.entropy, "confidence": -guess.sure, "margin": -guess.lead}
        order = np.argsort(by[self.order], kind="stable")
        entropy = np.maximum(guess.entropy[order], 0)  # which rounding may take below
        bound = entropy.cumsum() - np.maximum.accumulate(entropy)
        return order[: max(1, int(bound.searchsorted(self.gamma, "right")))]
