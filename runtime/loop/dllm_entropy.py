"""Dream's time schedule (arXiv:2508.15487): how many masks are filled by a grid of times, which by their entropy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from accel.ir.axis import option
from accel.runtime.decode.row import Row
from accel.runtime.loop._blocks import Blocks
from accel.runtime.loop._canvas import Guess, Place

ORDERS = ("entropy", "margin", "confidence", "origin")


@dataclass(frozen=True)
class DllmEntropy(Blocks):
    """Time goes from 1 to `end` in `steps` equal steps (0: as many as a block has masks). Of M masks a step from t to s
    fills floor(M (1 - s / t)), the last all that are left: those of least entropy, of the largest `margin` between the
    two best logits, or of the largest `confidence`; by `origin` each mask with the probability 1 - s / t, whatever the
    model says.

    The answer is one block, unless `block` is smaller. A step that fills nothing takes no call. The order is that of
    the model's probabilities, before temperature and top-p.
    """

    block: int = option(1 << 20, least=1)
    steps: int = option(0, least=0)
    end: float = option(1e-3, least=0, most=1)
    order: str = option("entropy", one_of=ORDERS)

    def begin(self, row: Row) -> Any:
        return {"at": 0}  # the next step of the grid

    def stays(self, guess: Guess, place: Place) -> Any:
        if not place.step:
            place.memory["at"] = 0
        chosen = np.zeros(0, np.int64)
        while not chosen.size:
            share = self.share(place.memory["at"], self.steps or place.total)
            place.memory["at"] += 1
            chosen = self._chosen(guess, share, place.rng)
        return chosen

    def share(self, step: int, steps: int) -> float:
        """Which share of the masks a step of the grid fills."""
        if step + 1 >= steps:
            return 1.0
        now, then = (1 + (self.end - 1) * i / steps for i in (step, step + 1))
        return 1 - then / now

    def _chosen(self, guess: Guess, share: float, rng: np.random.Generator) -> Any:
        if self.order == "origin":
            drawn = rng.random(len(guess)) < share
            return np.flatnonzero(drawn)
        by = {"entropy": guess.entropy, "confidence": -guess.sure, "margin": -guess.lead}
        return np.argsort(by[self.order], kind="stable")[: int(len(guess) * share)]
