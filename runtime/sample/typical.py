"""Locally typical sampling (arXiv:2202.00666): the tokens whose surprise is nearest to the entropy, up to a mass."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from accel.ir.axis import option
from accel.runtime.inputs.ints import Ints
from accel.runtime.sample import Base, Distribution, entropy


@dataclass(frozen=True)
class Typical(Base):
    """`mass`: the least probability of what is kept. Equals of the last one stay, as in transformers; the likeliest
    token may fall.
    """

    mass: float = option(0.9, above=0, below=1)

    def reshape(self, law: Distribution, seen: Ints) -> Distribution:
        p = law.probabilities
        with np.errstate(divide="ignore"):
            away = np.abs(-np.log(p) - entropy(p))
        reach = 1.0  # in nats; most tokens are further away, and need no sort
        near = np.flatnonzero(away <= reach)
        while p[near].sum() < self.mass and near.size < p.size:
            reach *= 2
            near = np.flatnonzero(away <= reach)
        order = near[np.argsort(away[near], kind="stable")]
        last = min(int((p[order].cumsum() < self.mass).sum()), order.size - 1)
        keep = np.flatnonzero(away <= away[order[last]])
        return Distribution(law.tokens[keep], law.weights[keep])
