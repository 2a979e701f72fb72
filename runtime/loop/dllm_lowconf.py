"""Low-confidence remasking in blocks (LLaDA, arXiv:2502.09992): each call keeps the most confident tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from accel.ir.axis import option
from accel.runtime.loop._blocks import Blocks, share
from accel.runtime.loop._canvas import Guess, Place


@dataclass(frozen=True)
class DllmLowconf(Blocks):
    """`steps` calls for each block, or 0: as many as it has slots, one token per call, what all other loops
    are compared with.
    """

    steps: int = option(0, least=0)

    @property
    def static(self) -> bool:
        return self.steps in (0, self.block)

    def stays(self, guess: Guess, place: Place) -> Any:
        return guess.first(share(place.total, self.calls(place.total), place.step))

    def calls(self, total: int) -> int:
        """How many calls a block of `total` masks takes."""
        return min(self.steps or total, total)

    def done(self, place: Place) -> float:
        """Which share of a row's slots its calls so far have filled."""
        return (place.before + place.total * place.step / self.calls(place.total)) / place.answer
