"""Spec-Verification (SpecDec, arXiv:2203.16487; GAD++, arXiv:2205.10350): a token is accepted if it is among the `beta`
best and its log-probability is within `tau` of the best one's. Greedy tokens differ from the target's, too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from accel.ir.axis import option
from accel.runtime.verify import Base, Chance, Target, Verdict
from accel.runtime.verify._longest import Stands, longest


@dataclass(frozen=True)
class TopBeta(Base):
    """Trees; q is not read. The longest accepted path is taken, among equals the most likely. `beta` = 1 takes what the
    target alone would, where it decodes greedily. Probabilities are those at temperature 1, with penalties; a row that
    samples accepts only what its sampler may draw.
    """

    beta: int = option(5, least=1, most=4096)
    tau: float = option(3.0, least=0)

    grade = "approximate"
    tolerant = True
    reads_q = False
    small = {"beta": 1}

    def judge(self, target: Target, chance: Chance) -> Verdict:
        def after(node: int) -> Stands:
            law, scores = target.law(node), target.scores(node)
            best = float(scores.max())

            def stands(token: int) -> float | None:
                score = float(scores[token])
                better = int((scores > score).sum() + (scores[:token] == score).sum())
                near = better < self.beta and score >= best - self.tau
                if not near or (law.random and not law.of(token)):
                    return None
                return score - best - math.log(float(np.exp(scores - best).sum(dtype=np.float64)))

            return stands

        return longest(target, chance, after)
