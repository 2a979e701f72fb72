"""2-bit weights, rounded by a calibration text (GPTQ, arXiv:2210.17323); 8 bits for the embedding, the head and what 2
bits harm most (FIT, arXiv:2210.08502).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from accel.passes.weights._chosen import Chosen


@dataclass(frozen=True)
class Int2(Chosen):
    """2.5 bits a weight with its scales, 8.5 for a fifth of the layers; experts in 4."""

    eight: float = 0.2

    few: ClassVar[int] = 2
    error = 4.0  # of random weights, where errors grow from layer to layer
