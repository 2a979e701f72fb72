"""Local determinism propagation (LocalLeap, arXiv:2510.07081): near a certain token, less certain ones stay too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from accel.ir.axis import option
from accel.runtime.loop._blocks import surest
from accel.runtime.loop._canvas import Guess, Place
from accel.runtime.loop.dllm_threshold import DllmThreshold


@dataclass(frozen=True)
class Localleap(DllmThreshold):
    """Masks of probability `threshold` or more are anchors and stay; so do those of `relaxed` or more that are at most
    `window` slots of the block away from one, and always the surest.

    `window` = 0, or `relaxed` = `threshold`, is `dllm-threshold`.
    """

    relaxed: float = option(0.75)
    window: int = option(4, least=0)

    def stays(self, guess: Guess, place: Place) -> Any:
        anchors = guess.slots[guess.sure >= self.threshold]
        near = (np.abs(guess.slots[:, None] - anchors) <= self.window).any(axis=1)
        sure = guess.sure >= self.threshold
        return surest(guess, sure | near & (guess.sure >= self.relaxed))
