"""GemFilter (arXiv:2409.17422): the last query at an early layer selects the prompt tokens that the model runs on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import Tensor

from accel.ir.axis import option
from accel.ir.invariants import Invariant
from accel.ir.prefill import Pick, Prefill
from accel.ir.program import Program
from accel.passes import Report
from accel.passes.prefill.prune import Base
from accel.passes.prefill.prune._cut import scoring
from accel.passes.prefill.prune._layer import deciding, near, products

_SHARE = 13 / 32  # of the depth, as the paper has it for Llama 3.1 8B


@dataclass(frozen=True)
class GemFilter(Base):
    """A prompt first runs through the layers before `layer` (-1: 13 of 32) and that layer's queries and
    keys. The `tokens`
    tokens with the highest q k^T for the last query, summed over the heads and averaged over `kernel`
    neighbours, become a new, shorter prompt, at positions from 0 on, in their order.

    The first `sinks` and the last `recent` tokens are always kept (0 and 0 in the paper's code, where the
    end of the question may be pruned).
    """

    tokens: int = option(1024, least=1)
    layer: int = option(-1, least=-1)
    kernel: int = option(5, least=1, most=63, odd=True)
    sinks: int = option(1, least=0)
    recent: int = option(8, least=0)
    small: ClassVar[Mapping[str, Any]] = {"tokens": 5, "recent": 2}

    relies = Base.relies | {Invariant.UNIFORM_SLOTS}  # scores are of slots

    def run(self, program: Program) -> Report:
        layer = deciding(program, "gemfilter", self.layer, _SHARE)
        program.entries["filter"] = scoring(program, 0, layer, self, whole=False)
        found = program.facts.prefill or Prefill()
        program.facts.prefill = replace(found, filter=Pick(self.tokens, self.sinks, self.recent))
        program.facts.notes.append(f"gemfilter picks a prompt's tokens at layer {layer}")
        return Report(changed=1)

    def score(
        self, queries: Tensor, query_positions: Tensor, keys: Tensor, positions: Tensor
    ) -> Tensor:
        return near(products(queries, query_positions, keys, positions), self.kernel)[:, 0]
