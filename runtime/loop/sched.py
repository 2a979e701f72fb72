"""Progress-aware confidence schedules (SchED, arXiv:2512.02892): the lead that ends decoding falls smoothly."""

from __future__ import annotations

from dataclasses import dataclass
from math import cos, exp, pi
from typing import Any

import numpy as np

from accel.ir.axis import option
from accel.runtime.decode.row import Row
from accel.runtime.loop._canvas import Guess, Place
from accel.runtime.loop.dllm_lowconf import DllmLowconf

SCHEDULES = ("linear", "cosine", "exponential", "staircase")
STEADY = -1  # patience that asks for nothing


@dataclass(frozen=True)
class Sched(DllmLowconf):
    """`dllm-lowconf`, until the leads of the best logits of a row's masks over the second ones reach a threshold, which
    falls from `high` to `low` over the row's steps; then all masks take what that call says.

    `over`: the leads' mean, median or least. `rate`: of the exponential schedule. `patience`: for more than so many
    calls the share of the masks whose best token changed was at most `most_changed`; -1: whether they changed does not
    matter. The staircase has `high`, the middle and `low`, a third of the steps each: with `patience` = -1, `prophet`.
    With `cache` = dual only masks of the block are seen.
    """

    high: float = option(7.5)
    low: float = option(2.5)
    schedule: str = option("linear", one_of=SCHEDULES)
    rate: float = option(4.0, least=0)
    over: str = option("mean", one_of=("mean", "median", "least"))
    patience: int = option(0, least=STEADY)
    most_changed: float = option(0.0, least=0, most=1)

    rest = True

    @property
    def static(self) -> bool:
        return False

    def begin(self, row: Row) -> Any:
        return {
            "tokens": {},
            "steady": 0,
        }  # slot -> its best token in the last call; calls without a change

    def ends(self, guess: Guess, place: Place) -> bool:
        steady = self._steady(guess, place.memory) > self.patience or self.patience == STEADY
        done = place.before + place.total * place.step / self.calls(place.total)
        lead = {
            "mean": guess.lead.mean(),
            "median": np.median(guess.lead),
            "least": guess.lead.min(),
        }
        return steady and bool(lead[self.over] >= self.least(done, place.answer))

    def _steady(self, guess: Guess, memory: Any) -> int:
        before, now = (
            memory["tokens"],
            dict(zip(guess.slots.tolist(), guess.tokens.tolist(), strict=True)),
        )
        changed = [before.get(slot) != token for slot, token in now.items()]
        memory["steady"] = memory["steady"] + 1 if np.mean(changed) <= self.most_changed else 0
        memory["tokens"] = now
        return int(memory["steady"])

    def least(self, done: float, answer: int) -> float:
        """The lead that ends decoding, after so many of `answer` steps."""
        high, low, t = self.high, self.low, min(1.0, done / max(1, answer - 1))
        if self.schedule == "staircase":
            share = done / answer
            return high if share < 0.33 else (high + low) / 2 if share < 0.67 else low
        if self.schedule == "linear":
            return high + (low - high) * t
        if self.schedule == "cosine":
            return low + (high - low) * (1 + cos(pi * t)) / 2
        return low + (high - low) * exp(-self.rate * t)
