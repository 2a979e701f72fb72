"""Chains that are drawn independently of each other, as SpecTr does (arXiv:2310.15141)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from accel.ir.axis import option
from accel.runtime.speculation.round_cost import RoundCost, unmeasured_cost
from accel.runtime.tree import Base, Draw, Growth, Shape, Siblings
from accel.runtime.tree._shaped import Form, formed, shaped


@dataclass(frozen=True)
class IndependentChains(Base, Shape):
    """`chains` of equal length, as long as the limit allows. Where tokens are chosen the chains begin with the
    likeliest ones. Chains that begin alike are a trie: the drafter is asked for what they share once, and the target
    checks it once; rules know how often each token was drawn.
    """

    chains: int = option(3, least=1, most=64)

    siblings = Siblings.INDEPENDENT

    def begin(self, cost: RoundCost = unmeasured_cost, level: float = 0.0) -> Shape:
        return self

    def grow(self, limit: int, draw: Draw | None = None) -> Growth:
        return shaped(_form(min(self.chains, limit), limit), draw, replacement=True)


@lru_cache(maxsize=256)
def _form(chains: int, limit: int) -> Form:
    length = limit // max(chains, 1)
    return formed([(chain, *[0] * level) for level in range(length) for chain in range(chains)])
