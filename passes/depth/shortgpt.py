"""ShortGPT (arXiv:2403.03853): delete the layers with the lowest block influence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from accel.ir.program import Program
from accel.passes.depth._delete import Ranks, tell
from accel.passes.stream import Stream


@dataclass(frozen=True)
class ShortGPT(Ranks):
    """Deletes the fraction `share` of the layers, with weights and caches; the first and the last layer stay.

    The block influence of a layer is 1 - cos(before, after) of the residual stream, averaged over `tokens` tokens of
    the calibration text without the first of each row, which many models use as an attention sink.
    """

    by = "influence"

    def scores(
        self, program: Program, calls: Sequence[fx.Node], text: Tensor
    ) -> tuple[Tensor, Tensor]:
        """See Ranks."""
        by_row = influence(program, calls, text)
        apart = by_row - by_row.mean(
            1, keepdim=True
        )  # a row may change the stream more in all layers
        error = apart.std(0) / len(text) ** 0.5 if len(text) > 1 else torch.zeros(len(calls))
        return by_row.mean(0), error


def influence(program: Program, calls: Sequence[fx.Node], text: Tensor) -> Tensor:
    """1 - mean cos(before, after) of each layer on each row of token ids [n,T], in float32: [n,L]."""
    found = torch.zeros(len(text), len(calls), dtype=torch.float64)
    with torch.no_grad():
        for n, row in enumerate(text.split(1)):
            tell(program, n, len(text))
            stream = Stream(program, calls, row)
            x = stream.start
            for i in range(len(calls)):
                before, x = x, stream.layer(i, x)
                near = F.cosine_similarity(before.float(), x.float(), dim=-1)[:, 1:]
                found[n, i] = 1 - near.nan_to_num(0.0).double().mean()
    return found
