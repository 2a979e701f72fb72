"""Speculative sampling with lenience (arXiv:2211.17192, appendix A.5; arXiv:2310.08461): a drafted token x is accepted
with probability min(1, p(x) / (l q(x))); the first rejected token is resampled from max(p - l q, 0).
"""

from __future__ import annotations

from dataclasses import dataclass

from accel.ir.axis import option
from accel.runtime.verify import Base, Chance, Target, Verdict
from accel.runtime.verify._residual import descend


@dataclass(frozen=True)
class Lenience(Base):
    """Chains. `lenience` is l: no token comes with more than 1 / l times the target's probability, and 1 is
    `spec-chain`. Greedy decoding takes what matches.
    """

    lenience: float = option(0.5, above=0, most=1)

    grade = "approximate"
    branches = False
    instead = "rrs-wor"

    def judge(self, target: Target, chance: Chance) -> Verdict:
        return descend(target, chance, 1 / self.lenience)
