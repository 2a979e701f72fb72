"""LazyLLM (arXiv:2407.14057): at several layers, the prompt tokens that the last token attends to least are dropped."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from accel.ir.axis import option
from accel.ir.errors import RecipeError
from accel.ir.prefill import Pick
from accel.ir.program import Program
from accel.passes import Report
from accel.passes.prefill.prune import Base
from accel.passes.prefill.prune._layer import deciding
from accel.passes.prefill.prune._stages import STAGED, staged


@dataclass(frozen=True)
class LazyLLM(Base):
    """At each of `stages` layers, one after every `spacing` of the depth, a `share` of the tokens that are left
    continues: those with the most attention of the last token there, and the last token itself.

    A dropped token does not return. In the paper a later step may compute it in the layers that lack it; which tokens
    these are depends on the data, so no graph of fixed shapes holds that step. To let later tokens read the
    whole prompt use `kv.select` instead, which drops none.
    """

    stages: int = option(3, least=1, most=64)
    spacing: float = option(0.3, above=0, below=1)
    share: float = option(0.7, above=0, most=1)
    lacks = "the return of a dropped token at a later step"
    small: ClassVar[Mapping[str, Any]] = {"share": 0.6}

    breaks = STAGED

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.stages * self.spacing >= 1:
            raise RecipeError(
                f"{self.full_name}: {self.stages} stages with a spacing of {self.spacing} go beyond the last layer; "
                "give fewer stages, or a smaller spacing"
            )

    def run(self, program: Program) -> Report:
        plan: dict[int, Pick] = {}  # stages that fall on one layer are one
        for stage in range(1, self.stages + 1):
            last = stage * self.spacing - 1 / max(1, len(program.facts.layers))
            layer = deciding(program, "lazyllm", -1, last, last=False)
            plan[layer] = Pick(0, 0, 1, self.share**stage)
        return staged(program, self, "lazyllm", plan)

    def score(self, weights: Tensor) -> Tensor:
        return weights.sum((1, 2))
