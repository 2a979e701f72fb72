"""The draft lengths of Draft & Verify (arXiv:2309.08168): a draft stops behind an unlikely token, by a threshold that
follows acceptance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from accel.ir.axis import option
from accel.runtime.call import Logits
from accel.runtime.length import Base, Pace
from accel.runtime.speculation.round_cost import RoundCost
from accel.runtime.tree import Level

KEPT = 0.5  # of the share that stood before, beside that of a new draft
ENOUGH = 0.9  # the share that is to stand
MOVED = 0.1  # of a step, what the threshold takes of it


@dataclass(frozen=True)
class DraftVerify(Base):
    """Drafts of up to `most` tokens, ended after one whose probability is below a threshold; of a tree, after a level
    that has no likelier one. The threshold begins at `threshold` (the paper: 0.8, and 0.5 to sample), and is per row.

    While less than 90 % of what is drafted stands, of late, it rises by a tenth of `step` with each draft; else it
    falls by as much, unless the draft went on to its end. `step` 0: it stays.
    """

    most: int = option(12, least=1, most=256)
    threshold: float = option(0.8, least=0, most=1)
    step: float = option(0.01, least=0, most=1)

    def begin(self, cost: RoundCost) -> Pace:
        return _Pace(self)


class _Pace(Pace):
    def __init__(self, of: DraftVerify):
        self._most, self._step = of.most, of.step
        self.threshold = of.threshold
        self._stood = 0.0  # the share, of late
        self._stopped = False  # whether this draft ended behind an unlikely token

    def limit(self) -> int:
        return self._most

    def more(self, level: Level, logits: Sequence[Logits]) -> bool:
        with np.errstate(over="ignore"):
            chance = max(
                float(1 / np.exp(line - line[token]).sum())
                for token, line in zip(level.tokens, logits, strict=True)
            )
        self._stopped = chance < self.threshold
        return not self._stopped

    def observe(self, drafted: int, accepted: int) -> None:
        self._stood = KEPT * self._stood + (1 - KEPT) * accepted / drafted
        moves = 1 if self._stood < ENOUGH else -int(self._stopped)
        self.threshold = min(1.0, max(0.0, self.threshold + MOVED * moves * self._step))
        self._stopped = False
