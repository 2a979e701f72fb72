"""K-SEQ (SpecTr, arXiv:2310.15141): of siblings drawn independently each is accepted with min(1, p / (rho q)), rho the
smallest threshold that leaves a distribution to draw from where none is; within 1 - 1/e of the optimal transport.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from accel.runtime.sample import Distribution
from accel.runtime.tree import ROOT, Siblings
from accel.runtime.verify import Base, Chance, Target, Verdict
from accel.runtime.verify._residual import ratio, residual, tried

HALVINGS = 45  # of the interval in which the threshold lies

Numbers = npt.NDArray[np.float64]


@dataclass(frozen=True)
class SpectrKseq(Base):
    """Trees. All nodes that hold the same tokens up to a place go on together, and also where the token that follows
    was drawn from what was left. Siblings that were chosen are tested one after the other, as by `rrs-wor`.
    """

    grade = "distribution-exact"
    siblings = frozenset({Siblings.INDEPENDENT, Siblings.CHOSEN})
    instead = "rrs-wor"

    def judge(self, target: Target, chance: Chance) -> Verdict:
        tree, alive = target.tree, [ROOT]
        while True:
            law = target.law(alive[0])
            nodes = [child for node in alive for child in tree.children(node)]
            if nodes and tree.law(nodes[0]).random:
                token = self._token(target, law, nodes, chance)
            else:
                stands, owed = tried(tree, law, nodes, chance)
                token = chance.draw(owed) if stands is None else int(tree.tokens[stands])
            found = dict.fromkeys(node for node in nodes if tree.tokens[node] == token)
            if not found:
                return Verdict(tree.path(alive[0]), token)
            alive = list(found)  # a node that was drawn twice has the children of both draws

    def _token(self, target: Target, p: Distribution, nodes: list[int], chance: Chance) -> int:
        """What follows, of these siblings or what they leave."""
        tree, q = target.tree, target.tree.law(nodes[0])
        drawn = q.dense(1 + max(int(p.tokens[-1]), int(q.tokens[-1])))[p.tokens]
        scale = self.threshold(p.probabilities, drawn, len(nodes))
        for node in nodes:
            token = int(tree.tokens[node])
            if chance.accept(ratio(p, q, token) / scale):
                return token
        return chance.draw(residual(p, left(p.probabilities, drawn, scale, len(nodes))))

    def threshold(self, p: Numbers, q: Numbers, count: int) -> float:
        """The smallest rho of 1 to `count` for p and q [n] by which no more is accepted of a token than its due."""
        low, high = 1.0, float(count)
        if count == 1 or _accepted(p, q, low, count)[1] <= 0:
            return low
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            low, high = (middle, high) if _accepted(p, q, middle, count)[1] > 0 else (low, middle)
        return high


def _accepted(p: Numbers, q: Numbers, scale: float, count: int) -> tuple[float, float]:
    """How often one of the siblings stands, and what of that is too much."""
    each = float(np.minimum(q, p / scale).sum())
    any_ = 1 - (1 - min(each, 1.0)) ** count
    return any_, any_ - scale * each


def left(p: Numbers, q: Numbers, scale: float, count: int) -> Numbers:
    """What the target still owes of each token [n], once none of the siblings stands."""
    each = np.minimum(q, p / scale)
    mass = float(each.sum())
    if not mass:
        return p
    return np.asarray(np.maximum(p - each * (_accepted(p, q, scale, count)[0] / mass), 0))
