"""Top-H decoding (arXiv:2509.02510): the likeliest tokens whose entropy is a share of the distribution's."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from accel.ir.axis import option
from accel.runtime.inputs.ints import Ints
from accel.runtime.sample import Base, Distribution, likeliest, surprise

BEST = 100  # tokens that are looked at, as in transformers


@dataclass(frozen=True)
class TopH(Base):
    """Of the 100 likeliest tokens, those whose sum of -p ln p is at most `share` of all of them, and the first.
    Among equals the lower ids stay. transformers' `top_h`, which runs before top_k, top_p and min_p there and behind
    them here.
    """

    share: float = option(0.4, above=0, most=1)

    def reshape(self, law: Distribution, seen: Ints) -> Distribution:
        best = likeliest(law.weights, BEST)
        p = law.weights[best].astype(np.float64)
        mass = surprise(p / p.sum()).cumsum()
        keep = np.sort(best[: max(1, int((mass <= self.share * mass[-1]).sum()))])
        return Distribution(law.tokens[keep], law.weights[keep])
