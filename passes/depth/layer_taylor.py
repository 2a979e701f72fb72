"""Layers by LLM-Pruner's saliency (arXiv:2305.11627): delete those whose weights the loss depends on least."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from accel.ir.axis import option
from accel.ir.program import Program
from accel.passes.depth._delete import Ranks
from accel.passes.gradients import layer_gradients


@dataclass(frozen=True)
class LayerTaylor(Ranks):
    """Deletes the fraction `share` of the layers, with weights and caches; the first and the last layer stay.

    The saliency of a layer is the sum over its weights of |weight x gradient|, where the gradient is that of the loss
    of `tokens` tokens of the calibration text, in samples of `length` tokens. The paper prunes heads and channels by
    it.
    """

    tokens: int = option(640, least=1)
    length: int = option(64, least=2)
    by = "saliency"
    lacks = "pruning of heads and channels"

    def text(self, program: Program) -> Tensor:
        """See Deletes."""
        return self.samples(program, self.length)

    def scores(
        self, program: Program, calls: Sequence[fx.Node], text: Tensor
    ) -> tuple[Tensor, Tensor]:
        """See Ranks."""
        found, error = torch.zeros(2, len(calls), dtype=torch.float64)
        both = layer_gradients(program, calls, text[::2])
        other = layer_gradients(program, calls, text[1::2] if len(text) > 1 else text)
        shares = [len(text[::2]), len(text[1::2])]
        for (i, one), (_, two) in zip(both, other, strict=True):
            sums = torch.zeros(3, dtype=torch.float64)
            for name, half in one.items():
                slopes = half.gradient, two[name].gradient
                mean = (slopes[0] * shares[0] + slopes[1] * shares[1]) / sum(shares)
                for n, slope in enumerate((mean, *slopes)):
                    sums[n] += float((half.weight * slope).abs().sum(dtype=torch.float64))
            found[i], error[i] = sums[0], (sums[1] - sums[2]).abs() / 2
        return found, error
