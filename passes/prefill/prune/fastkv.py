"""FastKV (arXiv:2502.01068): after a middle layer only the tokens that the last queries attend to continue."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from accel.ir.axis import option
from accel.ir.prefill import Pick
from accel.ir.program import Program
from accel.passes import Report
from accel.passes.prefill.prune import Base
from accel.passes.prefill.prune._layer import deciding, near
from accel.passes.prefill.prune._stages import STAGED, staged

_SHARE = 15 / 32  # of the depth, as the paper has it for Llama 3.1 8B


@dataclass(frozen=True)
class FastKV(Base):
    """A prompt runs through the layers up to `layer` (-1: 15 of 32, and not the last). A `share` of its tokens (the
    TSP rate), at most `tokens` of them (0: any number), continue through the other layers, at their own positions:
    those with the most attention of the last `window` queries there, summed over the heads and averaged over `kernel`
    neighbours, and the window itself.

    What each layer keeps in its cache is a budget of its own: `kv.score` = snapkv with the same window and kernel.
    """

    share: float = option(0.2, above=0, most=1)
    tokens: int = option(0, least=0)
    layer: int = option(-1, least=-1)
    window: int = option(8, least=1, most=1024)
    kernel: int = option(7, least=1, most=63, odd=True)
    small: ClassVar[Mapping[str, Any]] = {"share": 0.4, "window": 3, "kernel": 3}

    breaks = STAGED

    @property
    def observe(self) -> int:
        return self.window

    def run(self, program: Program) -> Report:
        layer = deciding(program, "fastkv", self.layer, _SHARE, last=False)
        pick = Pick(self.tokens, 0, self.window, self.share, self.window)
        return staged(program, self, "fastkv", {layer: pick})

    def score(self, weights: Tensor, query_positions: Tensor, positions: Tensor) -> Tensor:
        far = torch.iinfo(torch.int64).max
        first = query_positions.masked_fill(query_positions < 0, far).amin(1)  # of the window
        window = (positions < 0) | (positions >= first[:, None])
        return near(weights.sum((1, 2)).masked_fill(window, 0), self.kernel)
