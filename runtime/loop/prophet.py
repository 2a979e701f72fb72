"""Early commit (Prophet, arXiv:2508.19982): when the model is confident in the answer, all remaining masks
are filled at once.
"""

from __future__ import annotations

from dataclasses import dataclass

from accel.ir.axis import option
from accel.runtime.loop._canvas import Guess, Place
from accel.runtime.loop.dllm_lowconf import DllmLowconf


@dataclass(frozen=True)
class Prophet(DllmLowconf):
    """`dllm-lowconf`, until the best logits of a row's masks lead the second ones by `early` on average in the first
    third of its steps, by `middle` in the second, by `late` in the last. The row then takes what that call says
    of every mask that it computes: of `canvas` = dllm-blockcache, dual, those in the block.
    """

    early: float = option(7.5)
    middle: float = option(5.0)
    late: float = option(2.5)

    rest = True

    @property
    def static(self) -> bool:
        return False

    def ends(self, guess: Guess, place: Place) -> bool:
        return bool(guess.lead.mean() >= self.least(self.done(place)))

    def least(self, done: float) -> float:
        """The lead that commits, where this share of the steps is done."""
        return self.early if done < 0.33 else self.middle if done < 0.67 else self.late
