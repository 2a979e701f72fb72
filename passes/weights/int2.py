"""2-bit weights, rounded by a calibration text (GPTQ, arXiv:2210.17323); 6 bits for the embedding, the head and what 2
bits harm most (FIT, arXiv:2210.08502).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from accel.ir.axis import option
from accel.passes.weights._chosen import Chosen


@dataclass(frozen=True)
class Int2(Chosen):
    """2.5 bits a weight with its scales, 6.5 for a fifth of the layers; experts in 4."""

    six: float = option(0.2, least=0, most=1)

    few: ClassVar[int] = 2
    many: ClassVar[int] = 6
    error = 4.0  # of random weights, where errors grow from layer to layer

    @property
    def share(self) -> float:
        return self.six
