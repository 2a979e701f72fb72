"""NAME (paper, arXiv): what it does, in a sentence."""

from __future__ import annotations

from dataclasses import dataclass

from accel.ir.axis import option
from accel.runtime.inputs.ints import Ints
from accel.runtime.sample import Base, Distribution, at_least


@dataclass(frozen=True)
class Template(Base):
    """What the next token is drawn from: here, of tokens with at least `least` of the likeliest one's probability."""

    least: float = option(0.1, above=0, most=1)

    def reshape(self, law: Distribution, seen: Ints) -> Distribution:
        likeliest = law.probabilities.max()
        return at_least(law, self.least * likeliest)
