"""Speculative sampling (arXiv:2211.17192): a drafted token x is accepted with probability min(1, p(x) /
q(x)); the first rejected token is resampled from max(p - q, 0).
"""

from __future__ import annotations

from dataclasses import dataclass

from accel.runtime.verify import Base, Chance, Target, Verdict
from accel.runtime.verify._residual import descend


@dataclass(frozen=True)
class SpecChain(Base):
    """Chains, token by token. A token that was chosen, not sampled, is accepted with probability p(x)."""

    grade = "distribution-exact"
    branches = False
    instead = "rrs-wor"

    def judge(self, target: Target, chance: Chance) -> Verdict:
        return descend(target, chance)
