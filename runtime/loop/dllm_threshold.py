"""Confidence-aware parallel decoding (Fast-dLLM, arXiv:2505.22618): each call keeps all tokens above a confidence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from accel.ir.axis import option
from accel.runtime.loop._blocks import Blocks, surest
from accel.runtime.loop._canvas import Guess, Place


@dataclass(frozen=True)
class DllmThreshold(Blocks):
    """Tokens of probability `threshold` or more stay, and always the surest.

    With `factor` above 0 the n surest stay instead, as many as have (n + 1) (1 - probability) below it.
    """

    threshold: float = option(0.9)
    factor: float = option(0.0, least=0)

    @property
    def static(self) -> bool:
        return self.threshold > 1 and not self.factor

    def stays(self, guess: Guess, place: Place) -> Any:
        if not self.factor:
            return surest(guess, guess.sure >= self.threshold)
        order = guess.first(len(guess))
        fits = (np.arange(len(order)) + 2) * (1 - guess.sure[order]) < self.factor
        return order[: max(1, len(order) if fits.all() else int(fits.argmin()))]
