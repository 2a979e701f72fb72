"""Block verification (arXiv:2403.10444): a chain is verified as a whole, and its longest accepted prefix is taken; on
average at least as many tokens are accepted as token by token.
"""

from __future__ import annotations

from dataclasses import dataclass

from accel.runtime.verify import Base, Chance, Target, Verdict
from accel.runtime.verify._residual import excess, ratio, residual


@dataclass(frozen=True)
class BlockVerify(Base):
    """Chains. Each prefix has a weight b(i) = min(1, b(i-1) p(x) / q(x)), the probability with which the
    target supports it.
    """

    grade = "distribution-exact"
    branches = False
    instead = "rrs-wor"

    def judge(self, target: Target, chance: Chance) -> Verdict:
        tree, kept, laws = target.tree, [1.0], []
        for node, token in enumerate(tree.tokens.tolist()):
            laws.append(tree.law(node))
            weight = min(1.0, kept[-1] * ratio(target.law(node - 1), laws[node], token))
            if weight == 0:
                break
            kept.append(weight)
        # Each length has a chance of its own, and the longest that stands wins: so begin with it. It stands
        # with h = r / (r + 1 - b), r the mass of max(b p - q, 0): tried as b, and h / b where that holds.
        for length in reversed(range(len(kept))):
            follows, weight = target.law(length - 1), kept[length]  # before any token: ROOT
            if not chance.accept(weight):
                continue
            if length == len(tree):
                break
            over = excess(follows, laws[length], weight)
            follows, mass = residual(follows, over), float(over.sum())
            stands = mass / (mass + 1 - weight) if mass else float(weight == 1)
            if chance.accept(stands / weight):
                break
        return Verdict(tuple(range(length)), chance.draw(follows))
