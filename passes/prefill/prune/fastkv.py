"""FastKV (arXiv:2502.01068): after a middle layer only the tokens that the last queries attend to continue."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from accel.ir.axis import count
from accel.ir.errors import RecipeError
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

    share: float = 0.2
    tokens: int = 0
    layer: int = -1
    window: int = count(8, most=1024)
    kernel: int = count(7, most=63)
    small: ClassVar[Mapping[str, Any]] = {"share": 0.4, "window": 3, "kernel": 3}

    breaks = STAGED

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise RecipeError(
                f"prefill.prune.fastkv: share is {self.share}; give more than 0 and at most 1"
            )
        if self.tokens < 0 or self.layer < -1:
            raise RecipeError(
                f"prefill.prune.fastkv: tokens is {self.tokens} and layer {self.layer}; give at least 0 and -1"
            )
        if self.window < 1 or self.kernel < 1 or self.kernel % 2 == 0:
            raise RecipeError(
                f"prefill.prune.fastkv: window is {self.window} and kernel {self.kernel}; give a window of at "
                "least 1 and an odd kernel"
            )

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
