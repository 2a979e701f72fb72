"""Recursive rejection sampling without replacement (MCSD, arXiv:2401.06706; Sequoia, arXiv:2402.12374): siblings
are tried in the order in which they were drawn, each against what the target still owes after those before it.
"""

from __future__ import annotations

from dataclasses import dataclass

from accel.runtime.verify import Base, Chance, Target, Verdict
from accel.runtime.verify._residual import descend


@dataclass(frozen=True)
class RrsWor(Base):
    """Trees. Each sibling counts as drawn from what the tree says of it: without replacement, with it, or
    chosen.
    """

    grade = "distribution-exact"

    def judge(self, target: Target, chance: Chance) -> Verdict:
        return descend(target, chance)
