"""The decoding rule of dParallel (arXiv:2509.26488): each call keeps all tokens below an entropy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from accel.ir.axis import option
from accel.runtime.loop._blocks import Blocks
from accel.runtime.loop._canvas import Guess, Place


@dataclass(frozen=True)
class Dparallel(Blocks):
    """Tokens of masks whose entropy is at most `threshold` nats stay, and always that of the least entropy."""

    threshold: float = option(0.5, least=0)

    lacks = "the training that makes a model certain of many masks at once"

    def stays(self, guess: Guess, place: Place) -> Any:
        stays = guess.entropy <= self.threshold
        stays[guess.entropy.argmin()] = True
        return np.flatnonzero(stays)
