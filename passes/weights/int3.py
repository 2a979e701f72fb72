"""3-bit weights, rounded by a calibration text (GPTQ, arXiv:2210.17323); 8 bits for the embedding, the head and what 3
bits harm most (FIT, arXiv:2210.08502).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from accel.passes.weights._chosen import Chosen


@dataclass(frozen=True)
class Int3(Chosen):
    """3.5 bits a weight with its scales, 8.5 for a tenth of the layers; experts in 4."""

    eight: float = 0.1

    few: ClassVar[int] = 3
    error = 2.4  # of random weights, where errors grow from layer to layer
