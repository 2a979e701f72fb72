"""NAME (paper, arXiv): what it does, in a sentence."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from accel.ir.axis import option
from accel.runtime.sample import Base, Distribution, numbers


@dataclass(frozen=True)
class Template(Base):
    """What the next token is drawn from: here, softmax(logits / temperature)."""

    temperature: float = option(1.0, above=0)

    def scores(
        self, logits: npt.NDArray[np.float32], seen: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.float32]:
        return numbers(logits)

    def distribution(
        self, logits: npt.NDArray[np.float32], seen: npt.NDArray[np.int64]
    ) -> Distribution:
        scores = self.scores(logits, seen)
        weights = np.exp((scores - scores.max()) / self.temperature)
        return Distribution(np.arange(scores.size), weights)
