"""The draft lengths of transformers' assisted generation: adapted to acceptance, and stopped at low
confidence with an adaptive threshold.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from accel.ir.axis import option
from accel.runtime.call import Logits
from accel.runtime.length import Base, Pace
from accel.runtime.speculation.round_cost import RoundCost
from accel.runtime.tree import Level

SCHEDULES = ("constant", "heuristic")
ENOUGH, KEPT = 5, 1000  # tokens that a threshold is found by: more than, and the newest of
MISSED = 3  # what a draft ended too early costs, where one that went on in vain costs 1


@dataclass(frozen=True)
class HfAssist(Base):
    """Drafts of up to `tokens`; with schedule "heuristic" plus two after each fully accepted draft, minus
    one after any other. A drafter with logits stops after a token with probability below `threshold` (0: never); of a
    tree, after a level that has no likelier one.

    The threshold is per row. transformers 5.2 computes the new one but drafts with the old one.
    """

    tokens: int = option(20, least=1, most=256)
    schedule: str = option("constant", one_of=SCHEDULES)
    threshold: float = option(0.4, least=0, most=1)

    def begin(self, cost: RoundCost) -> Pace:
        return _Pace(self)


class _Pace(Pace):
    def __init__(self, of: HfAssist):
        self._tokens, self._adapts = of.tokens, of.schedule == "heuristic"
        self.threshold = of.threshold
        self._asked: list[
            float
        ] = []  # how likely this draft's tokens were, of each level the likeliest
        self._known: deque[tuple[float, bool]] = deque(
            maxlen=KEPT
        )  # how likely a token was, and whether it stood

    def limit(self) -> int:
        return self._tokens

    def more(self, level: Level, logits: Sequence[Logits]) -> bool:
        if not self.threshold:
            return True
        with np.errstate(over="ignore"):
            chances = [
                float(1 / np.exp(line - line[token]).sum())
                for token, line in zip(level.tokens, logits, strict=True)
            ]
        self._asked.append(max(chances))
        return self._asked[-1] >= self.threshold

    def observe(self, drafted: int, accepted: int) -> None:
        if self._adapts:
            self._tokens = self._tokens + 2 if accepted == drafted else max(1, self._tokens - 1)
        tested = self._asked[:drafted][: accepted + 1]
        self._asked = []
        if tested:
            self._known.extend((chance, place < accepted) for place, chance in enumerate(tested))
            self._adapt()

    def _adapt(self) -> None:
        """The threshold at which fewest of the known tokens would have been dealt with wrongly."""
        chances, stood = (
            np.array([c for c, _ in self._known]),
            np.array([s for _, s in self._known]),
        )
        if len(stood) <= ENOUGH or stood.all() or not stood.any():
            return
        order = np.argsort(-chances, kind="stable")
        chances, stood = chances[order], stood[order]
        ends = np.append(
            np.flatnonzero(np.diff(chances)), len(chances) - 1
        )  # equal chances go together
        right, wrong = np.cumsum(stood)[ends], np.cumsum(~stood)[ends]
        costs = wrong / wrong[-1] + MISSED * (1 - right / right[-1])
        self.threshold = float(chances[ends[np.argmin(costs)]])
