"""Dream's time schedule (arXiv:2508.15487): how many masks are filled by a grid of times, which by their entropy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from accel.ir.axis import option
from accel.runtime.decode.row import Row
from accel.runtime.loop._blocks import Blocks
from accel.runtime.loop._canvas import Floats, Guess, Place
from accel.runtime.sample import surprise

ORDERS = ("entropy", "margin", "confidence", "origin")


@dataclass(frozen=True)
class DllmEntropy(Blocks):
    """Time goes from 1 to `end` in `steps` equal steps (0: as many as a block has masks). Of M masks a step from t to s
    fills floor(M (1 - s / t)), the last all that are left: those of least entropy, of the largest `margin` between the
    two best probabilities, or of the largest `confidence`. With `order_temperature` T above 0 they are drawn without
    replacement, weighted by the softmax of those scores over T. By `origin` each mask is filled with the probability
    1 - s / t, whatever the model says.

    The answer is one block, unless `block` is smaller. A step that fills nothing takes no call, and one fills no more
    masks than its call says something of. The order is that of
    what tokens are drawn from, behind temperature, top-k and top-p.
    """

    block: int = option(1 << 20, least=1)
    steps: int = option(0, least=0)
    end: float = option(1e-3, least=0, most=1)
    order: str = option("entropy", one_of=ORDERS)
    order_temperature: float = option(0.0, least=0)

    def begin(self, row: Row) -> Any:
        return {"row": row, "at": 0}  # the next step of the grid

    def stays(self, guess: Guess, place: Place) -> Any:
        memory = place.memory
        if not place.step:
            memory["at"] = 0
        order = None if self.order == "origin" else self._order(guess, memory["row"])
        chosen = np.zeros(0, np.int64)
        while not chosen.size:
            share = self.share(memory["at"], self.steps or place.total)
            memory["at"] += 1
            if order is None:
                chosen = np.flatnonzero(place.rng.random(len(guess)) < share)
            else:
                chosen = order[: int(place.open.sum() * share)]
        return chosen

    def share(self, step: int, steps: int) -> float:
        """Which share of the masks a step of the grid fills."""
        if step + 1 >= steps:
            return 1.0
        now, then = (1 + (self.end - 1) * i / steps for i in (step, step + 1))
        return 1 - then / now

    def _order(self, guess: Guess, row: Row) -> Any:
        """The places of a guess, those to be filled first at the front."""
        laws = _drawn_from(guess, row)
        if self.order == "entropy":
            score = -surprise(laws).sum(axis=1)
        elif self.order == "margin":
            two = np.partition(laws, -2, axis=1)[:, -2:]
            score = two[:, 1] - two[:, 0]
        else:
            score = laws[np.arange(len(guess)), guess.tokens]
        if self.order_temperature:  # the largest of these are draws without replacement
            score = score / self.order_temperature + row.rng.gumbel(size=len(guess))
        return np.argsort(-score, kind="stable")


def _drawn_from(guess: Guess, row: Row) -> Floats:
    """What the tokens of a guess are drawn from, [n,V]; the model's probabilities where nothing is drawn."""
    if row.sampler.greedy:
        return guess.probabilities
    laws = [row.sampler.distribution(one, row.seen) for one in guess.logits]
    if not laws[0].random:
        return guess.probabilities
    return np.stack([law.dense(guess.logits.shape[1]) for law in laws])
