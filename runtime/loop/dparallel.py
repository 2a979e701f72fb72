"""dParallel (arXiv:2509.26488): each call keeps all tokens below an entropy, which the model was tuned to be below."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from accel.ir.axis import option
from accel.runtime.loop._blocks import Blocks
from accel.runtime.loop._canvas import Guess, Place


@dataclass(frozen=True)
class Dparallel(Blocks):
    """Tokens of masks whose entropy is at most `threshold` nats stay, and always that of the least entropy.

    `accel-compile train dparallel MODEL --out DIR` makes an adapter with which the model is certain of many masks at
    once; a build takes it with `--merge-adapter DIR`. The rule alone goes with any model that fills masks.
    """

    threshold: float = option(0.5, least=0)

    key = "dparallel"

    def stays(self, guess: Guess, place: Place) -> Any:
        stays = guess.entropy <= self.threshold
        stays[guess.entropy.argmin()] = True
        return np.flatnonzero(stays)
