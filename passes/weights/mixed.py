"""Mixed precision: as int4, but half of the layers' weights in 8 bits: those that 4 bits harm most for
their bytes (FIT, arXiv:2210.08502).
"""

from __future__ import annotations

from dataclasses import dataclass

from accel.ir.axis import option
from accel.passes.weights._chosen import Chosen


@dataclass(frozen=True)
class Mixed(Chosen):
    """Between int4 and int8: 6.5 bits a weight of the layers, with its scales."""

    eight: float = option(0.5, least=0, most=1)

    error = 1.2  # of random weights, where errors grow from layer to layer

    @property
    def share(self) -> float:
        return self.eight
