"""SpAtten (arXiv:2012.09852): layer by layer, the prompt tokens with the least accumulated attention are dropped."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from accel.ir.axis import option
from accel.ir.errors import PassError, RecipeError
from accel.ir.prefill import Pick
from accel.ir.program import Program
from accel.passes import Report
from accel.passes.prefill.prune import Base
from accel.passes.prefill.prune._layer import deciding
from accel.passes.prefill.prune._stages import STAGED, staged


@dataclass(frozen=True)
class SpAtten(Base):
    """The score of a token is the attention that it drew so far, over all queries, heads and layers. The first
    `dense` layers (-1: 15 %, and at least 3) read the whole prompt. Then the share of tokens that a layer reads falls
    from layer to layer, in a line, to `share` at the last; the tokens that are left have the highest scores. A
    token that is dropped is absent from all later layers and from later steps.

    `heads`: the share of query heads that the last layer reads, those whose outputs were largest so far, down
    to it in the same line. The others are masked in later layers and later steps, which saves no time.

    `stages`: at how many layers tokens are dropped, evenly spaced (0: at each, as in the paper). Each is one more
    graph. The first `sinks` and the last `recent` tokens always stay, because early tokens are read by more queries.

    The paper's local value pruning and bit planes save reads of its hardware only.
    """

    share: float = option(0.3, above=0, most=1)
    heads: float = option(1.0, above=0, most=1)
    dense: int = option(-1, least=-1)
    stages: int = option(0, least=0, most=1024)
    sinks: int = option(4, least=0)
    recent: int = option(32, least=0)
    lacks = "local value pruning and bit planes, which save its hardware's reads"
    every: ClassVar[bool] = True
    small: ClassVar[Mapping[str, Any]] = {"share": 0.4, "dense": 1, "sinks": 1, "recent": 4}

    breaks = STAGED

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dense == 0:
            raise RecipeError(f"{self.full_name}: dense is 0; give at least 1 layer, or -1")

    @property
    def observe(self) -> int:
        return 0

    def run(self, program: Program) -> Report:
        layers = len(program.facts.layers)
        dense = self.dense if self.dense > 0 else max(3, math.ceil(0.15 * layers))
        if dense >= layers:
            raise PassError(
                f"spatten: {dense} layers read the whole prompt, and the model has {layers}; give dense, "
                f"1..{layers - 1}"
            )
        number = min(self.stages or layers - dense, layers - dense)
        plan: dict[int, Pick] = {}
        heads: dict[int, float] = {}
        for stage in range(1, number + 1):
            share = 1 - (1 - self.share) * stage / number
            first = dense + (layers - dense) * (stage - 1) // number  # layer that reads so many
            layer = deciding(program, "spatten", -1, (first - 1) / layers, last=False)
            plan[layer] = Pick(0, self.sinks, self.recent, share, 0, always=self.heads < 1)
            heads[layer] = 1 - (1 - self.heads) * stage / number
        shares = [heads[layer] for layer in sorted(heads)] if self.heads < 1 else []
        return staged(program, self, "spatten", plan, shares)

    def score(self, weights: Tensor, before: Tensor) -> Tensor:
        return before + weights.sum((1, 2))
