"""Eta sampling (arXiv:2210.15191): no token below a probability, which is the lower the more the model is unsure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from accel.ir.axis import option
from accel.runtime.inputs.ints import Ints
from accel.runtime.sample import Base, Distribution, at_least, entropy


@dataclass(frozen=True)
class Eta(Base):
    """The bound is `epsilon`, or √epsilon · e^(-entropy) where that is less. The likeliest tokens always stay."""

    epsilon: float = option(3e-4, above=0, below=1)

    def reshape(self, law: Distribution, seen: Ints) -> Distribution:
        unsure = math.sqrt(self.epsilon) * math.exp(-entropy(law.probabilities))
        return at_least(law, min(self.epsilon, unsure))
