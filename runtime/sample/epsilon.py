"""Epsilon sampling (arXiv:2210.15191): no token below a probability."""

from __future__ import annotations

from dataclasses import dataclass

from accel.ir.axis import option
from accel.runtime.inputs.ints import Ints
from accel.runtime.sample import Base, Distribution, at_least


@dataclass(frozen=True)
class Epsilon(Base):
    """The likeliest tokens always stay."""

    epsilon: float = option(3e-4, above=0, below=1)

    def reshape(self, law: Distribution, seen: Ints) -> Distribution:
        return at_least(law, self.epsilon)
