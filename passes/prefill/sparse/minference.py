"""MInference (arXiv:2407.02490): the vertical and slash lines that the last queries attend to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from accel.ir.axis import count
from accel.ir.errors import RecipeError
from accel.passes.prefill.sparse import Base
from accel.passes.prefill.sparse._inputs import best_of_next, diagonals, probabilities

_ALWAYS = 1e9


@dataclass(frozen=True)
class MInference(Base):
    """Attention of a segment's last `observe` queries, summed over them and the heads of a group, gives each key
    a vertical value and each distance a slash value. The best `columns` keys are read singly, the first `sinks` among
    them. Blocks are those that the best distances cross, all up to `near` among them, until the budget is full: a block
    is worth its best distance.

    All heads are vertical-slash, as in the release those that its search did not list; the search, per head and model,
    is left out. Runs of keys are of a segment's queries, not of 64, and are rounded outward to blocks: more is
    read.
    """

    block: int = count(64, most=4096)
    budget: int = 3072
    columns: int = 1024
    observe: int = count(64, most=4096)
    sinks: int = 30
    near: int = 100
    small: ClassVar[Mapping[str, Any]] = {
        "segment": 8, "block": 4, "budget": 8, "threshold": 8, "columns": 4, "observe": 4, "sinks": 1, "near": 2
    }  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        for option in ("observe", "columns"):
            if getattr(self, option) < 1:
                raise RecipeError(
                    f"prefill.sparse.minference: {option} is {getattr(self, option)}; give at least 1"
                )
        if min(self.sinks, self.near) < 0 or self.sinks > self.columns:
            raise RecipeError(
                f"prefill.sparse.minference: sinks is {self.sinks} and near {self.near}; give 0 .. columns = "
                f"{self.columns} and at least 0"
            )

    def score_columns(self, logits: Tensor) -> Tensor:
        vertical = probabilities(logits).sum((2, 3))  # [B,G,C]
        number = torch.arange(vertical.shape[2], device=vertical.device)
        return vertical + _ALWAYS * (number < self.sinks)

    def score(self, logits: Tensor, first: Tensor, queries: Tensor) -> Tensor:
        slash = diagonals(probabilities(logits).sum(2))  # [B,G,C+W-1]
        distance = (first + queries.shape[2] - 1)[:, None] - torch.arange(
            slash.shape[2], device=slash.device
        )
        slash = slash + _ALWAYS * (distance < self.near)[:, None]
        return crossed(slash, logits.shape[4] // self.block, self.block, self.segment)


def crossed(slash: Tensor, blocks: int, block: int, segment: int) -> Tensor:
    """The best of the diagonals [B,G,M] (see `diagonals`) on which a query of the segment reads a key of the block:
    [B,G,NB]. Block b is crossed by those from its first slot to its last + segment - 1.
    """
    cut = slash[:, :, : blocks * block].unflatten(2, (blocks, block))
    whole, start = cut.amax(3), cut[..., : block - 1]
    shift = segment // block
    found = best_of_next(whole, shift)
    if block == 1:
        return found
    past_end = torch.nn.functional.pad(start.amax(3), (0, shift), value=0.0)[..., shift:]
    return torch.maximum(found, past_end)
