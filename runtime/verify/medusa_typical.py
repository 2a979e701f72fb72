"""Typical acceptance (Medusa, arXiv:2401.10774): a token is accepted if its probability is above
min(epsilon, delta exp(-entropy)). The output distribution differs from the target's: likely drafts are favoured.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from accel.ir.axis import option
from accel.runtime.sample import Distribution
from accel.runtime.verify import Base, Chance, Target, Verdict
from accel.runtime.verify._longest import Stands, longest


@dataclass(frozen=True)
class MedusaTypical(Base):
    """Trees; q is not read. The longest accepted path is taken, among equals the most likely."""

    epsilon: float = option(0.09, least=0)
    delta: float = option(0.3, least=0)

    grade = "approximate"
    reads_q = False

    def judge(self, target: Target, chance: Chance) -> Verdict:
        def after(node: int) -> Stands:
            law = target.law(node)
            least = self._least(law)
            return lambda token: math.log(found) if (found := law.of(token)) > least else None

        return longest(target, chance, after)

    def _least(self, law: Distribution) -> float:
        """What a token's probability has to exceed."""
        p = law.probabilities
        entropy = -float((p * np.log(p + 1e-5)).sum())
        return min(self.epsilon, self.delta * math.exp(-entropy))
