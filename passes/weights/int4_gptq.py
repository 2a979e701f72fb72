"""GPTQ (arXiv:2210.17323): 4-bit weights; each column's rounding error is compensated in the remaining columns."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from accel.ir.axis import option
from accel.passes.weights._blocks import Packed, Site
from accel.passes.weights._calibrated import Calibrated
from accel.passes.weights._feedback import feedback_of, round_with_feedback


@dataclass(frozen=True)
class Int4Gptq(Calibrated):
    """As int4, with the errors fed back. `damping`: share of the mean second moment of the inputs that
    is added to every one, which keeps the correction small where few inputs tell of it.
    """

    damping: float = option(0.01, above=0)

    error = 1.2  # of random weights, where errors grow from layer to layer

    def bits(self, site: Site, layers: int) -> int:
        return 4

    def rounded(self, weight: Tensor, inputs: Tensor, bits: int) -> Packed:
        order, factor = feedback_of(inputs, self.damping)
        return round_with_feedback(weight, order, factor, bits, self.block, self.symmetric)
