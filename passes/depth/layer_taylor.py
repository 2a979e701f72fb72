"""Layers by LLM-Pruner's saliency (arXiv:2305.11627): delete those whose weights the loss depends on least."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from accel.ir.axis import option
from accel.ir.program import Program
from accel.passes.depth._delete import Ranks, tell
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
        sums = torch.zeros(len(calls), 3, dtype=torch.float64)  # of all samples, and of each half
        halves = text[::2], text[1::2] if len(text) > 1 else text
        both = (layer_gradients(program, calls, half) for half in halves)
        for (i, one), (_, two) in zip(*both, strict=True):
            tell(program, len(calls) - 1 - i, len(calls))
            for name, half in one.items():
                slopes = half.gradient, two[name].gradient
                mean = sum(s * len(h) for s, h in zip(slopes, halves, strict=True))
                for n, slope in enumerate((mean / sum(map(len, halves)), *slopes)):
                    sums[i, n] += float((half.weight * slope).abs().sum(dtype=torch.float64))
        found = sums[:, 0]
        shares = sums / sums.sum(0).clamp(
            min=torch.finfo(sums.dtype).tiny
        )  # a half may have a larger loss
        return found, (shares[:, 1] - shares[:, 2]).abs() / 2 * found.sum()
