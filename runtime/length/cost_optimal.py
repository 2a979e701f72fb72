"""The draft length with the most expected tokens per time, from recent acceptance by position and the costs of calls
and drafter (arXiv:2211.17192; by position, as for trees, arXiv:2402.12374).
"""

from __future__ import annotations

from dataclasses import dataclass

from accel.ir.axis import option
from accel.runtime.length import Base, Pace
from accel.runtime.speculation.guard import LONGEST
from accel.runtime.speculation.odds import Odds
from accel.runtime.speculation.round_cost import RoundCost


@dataclass(frozen=True)
class CostOptimal(Base):
    """Drafts of up to `most` tokens, and none if drafting is slower; a token is then tried after a pause,
    which doubles after each rejection. `fade`: decay of older acceptance statistics per draft.
    """

    most: int = option(31, least=1, most=256)
    fade: float = option(0.95, above=0, most=1)

    def begin(self, cost: RoundCost) -> Pace:
        return _Pace(self, cost)


class _Pace(Pace):
    def __init__(self, of: CostOptimal, cost: RoundCost):
        self._most, self._round_cost = of.most, cost
        self._odds = Odds(of.fade)
        self._pause = self._left = 1  # rounds without a draft: in a row, and to come

    def limit(self) -> int:
        if best := self._odds.best(self._round_cost, 0, self._most):
            return best
        self._left -= 1
        return 0 if self._left else 1

    def observe(self, drafted: int, accepted: int) -> None:
        self._odds.observe([(drafted, accepted)])
        if not self._left:
            self._pause = 1 if accepted else min(2 * self._pause, LONGEST)
        self._left = self._pause
