"""PromptDistill (arXiv:2503.23274): after a middle layer only the selected prompt tokens continue."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from accel.ir.axis import option
from accel.ir.prefill import Pick
from accel.ir.program import Program
from accel.passes import Report
from accel.passes.prefill.prune import Base
from accel.passes.prefill.prune._layer import deciding, near, products
from accel.passes.prefill.prune._stages import STAGED, staged

_SHARE = 13 / 32  # of the depth, as the paper has it for Llama 3.1 8B


@dataclass(frozen=True)
class PromptDistill(Base):
    """A prompt runs through the layers up to `layer` (-1: 13 of 32, and not the last). The `tokens` tokens
    with the highest
    q k^T for the last query there, averaged over the heads and over `kernel` neighbours, continue through
    the other layers, at
    their own positions; the last token is one of them. Layers after `layer` cache only these tokens.

    The first layers cache all prompt tokens. The paper's cache truncation for these layers is an eviction by
    layer and head: use `kv.score`.
    """

    tokens: int = option(1024, least=1)
    layer: int = option(-1, least=-1)
    kernel: int = option(5, least=1, most=63, odd=True)
    lacks = "cache truncation of the first layers (an eviction recipe does it)"
    small: ClassVar[Mapping[str, Any]] = {"tokens": 5}

    breaks = STAGED

    def run(self, program: Program) -> Report:
        layer = deciding(program, "promptdistill", self.layer, _SHARE, last=False)
        return staged(program, self, "promptdistill", {layer: Pick(self.tokens, 0, 1)})

    def score(
        self, queries: Tensor, query_positions: Tensor, keys: Tensor, positions: Tensor
    ) -> Tensor:
        found = products(queries, query_positions, keys, positions, include_self=False)
        return near(found, self.kernel)[:, 0]
