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
    Masks that a call does not compute (`canvas`) are not seen.
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
        }  # slot -> its token in the last call; calls without a change

    def ends(self, guess: Guess, place: Place) -> bool:
        steady = self._steady(guess, place.memory) > self.patience or self.patience == STEADY
        lead = guess.lead
        over = {"mean": lead.mean(), "median": np.median(lead), "least": lead.min()}[self.over]
        return steady and bool(over >= self.least(self._time(place), self.done(place)))

    def _steady(self, guess: Guess, memory: Any) -> int:
        before = memory["tokens"]
        now = dict(zip(guess.slots.tolist(), guess.tokens.tolist(), strict=True))
        changed = [before.get(slot) != token for slot, token in now.items()]
        memory["steady"] = memory["steady"] + 1 if np.mean(changed) <= self.most_changed else 0
        memory["tokens"] = now
        return int(memory["steady"])

    def _time(self, place: Place) -> float:
        """From 0 at a row's first call to 1 at the last that it can take."""
        full, rest = divmod(place.answer, self.block)
        each = self.calls(self.block)
        calls = full * each + self.calls(rest)
        return (place.before // self.block * each + place.step) / max(1, calls - 1)

    def least(self, time: float, done: float) -> float:
        """The lead that ends decoding at a time, where this share of the slots is filled."""
        high, low = self.high, self.low
        if self.schedule == "staircase":
            return high if done < 0.33 else (high + low) / 2 if done < 0.67 else low
        if self.schedule == "linear":
            return high + (low - high) * time
        if self.schedule == "cosine":
            return low + (high - low) * (1 + cos(pi * time)) / 2
        return low + (high - low) * exp(-self.rate * time)
