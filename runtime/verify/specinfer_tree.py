"""Multi-step speculative sampling (SpecInfer, arXiv:2305.09781): siblings are tested in random order, each against what
those before it left of the target's distribution.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from accel.runtime.sample import Distribution
from accel.runtime.tree import ROOT, Siblings
from accel.runtime.verify import Base, Chance, Target, Verdict
from accel.runtime.verify._residual import tried


@dataclass(frozen=True)
class SpecinferTree(Base):
    """Trees. Siblings drawn without replacement have an order, which a random one would break."""

    grade = "distribution-exact"
    siblings = frozenset({Siblings.INDEPENDENT, Siblings.CHOSEN})
    instead = "rrs-wor"

    def judge(self, target: Target, chance: Chance) -> Verdict:
        tree, node, path = target.tree, ROOT, list[int]()
        while True:
            law, untried = target.law(node), list(tree.children(node))
            found: int | None = None
            while untried and found is None:
                places = np.arange(len(untried))
                one = untried.pop(chance.draw(Distribution(places, np.ones(len(places)))))
                found, law = tried(tree, law, [one], chance)
            if found is None:
                return Verdict(tuple(path), chance.draw(law))
            node = found
            path.append(node)
