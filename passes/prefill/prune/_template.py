"""NAME (paper, arXiv): what it does, in a sentence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import Tensor

from accel.ir.axis import option
from accel.ir.prefill import Pick, Prefill
from accel.ir.program import Program
from accel.passes import Report
from accel.passes.prefill.prune import Base
from accel.passes.prefill.prune._cut import scoring
from accel.passes.prefill.prune._layer import deciding, products


@dataclass(frozen=True)
class Template(Base):
    """The `tokens` of a prompt that stay: here, those that a middle layer's last query scores highest."""

    tokens: int = option(1024, least=1)
    small: ClassVar[Mapping[str, Any]] = {"tokens": 5}

    def run(self, program: Program) -> Report:
        layer = deciding(program, "template", -1, 0.5)
        program.entries["filter"] = scoring(program, 0, layer, self, whole=False)
        found = program.facts.prefill or Prefill()
        program.facts.prefill = replace(found, filter=Pick(self.tokens, 0, 1))
        return Report(changed=1)

    def score(
        self, queries: Tensor, query_positions: Tensor, keys: Tensor, positions: Tensor
    ) -> Tensor:
        return products(queries, query_positions, keys, positions)[:, 0]
