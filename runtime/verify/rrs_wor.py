"""Recursive rejection sampling without replacement (MCSD, arXiv:2401.06706; Sequoia, arXiv:2402.12374): siblings are
tested in sampling order, each against the residual distribution after the siblings before it.
"""

from __future__ import annotations

from dataclasses import dataclass

from accel.runtime.verify import Base, Chance, Target, Verdict
from accel.runtime.verify._residual import descend


@dataclass(frozen=True)
class RrsWor(Base):
    """Trees. Siblings are treated as sampled without replacement, with replacement, or chosen, as the tree declares."""

    grade = "distribution-exact"

    def judge(self, target: Target, chance: Chance) -> Verdict:
        return descend(target, chance)
