"""4-bit weights, rounded by a calibration text (GPTQ, arXiv:2210.17323); 8 bits for the embedding, the head and what 4
bits harm most (FIT, arXiv:2210.08502).
"""

from __future__ import annotations

from dataclasses import dataclass

from accel.ir.axis import option
from accel.passes.weights._chosen import Chosen


@dataclass(frozen=True)
class Int4(Chosen):
    """About as many bytes as llama.cpp's Q4_K_M: 4.5 bits a weight with its scales, 8.5 for a sixth of the layers."""

    eight: float = option(0.17, least=0, most=1)

    error = 1.2  # of random weights, where errors grow from layer to layer

    @property
    def share(self) -> float:
        return self.eight
