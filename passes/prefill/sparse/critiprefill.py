"""CritiPrefill (arXiv:2409.12490): queries of a segment agree on the blocks of keys that matter to them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from accel.ir.errors import RecipeError
from accel.passes.prefill.sparse import Base


@dataclass(frozen=True)
class CritiPrefill(Base):
    """A block is worth what the middle between the largest and the smallest numbers of a segment's queries
    makes of the block's largest or smallest ones, whichever is more, as a mean over the heads of a group.
    Blocks are chosen by the softmax of that, of which a share `fusion` comes from the layer before.

    The paper's code leaves out the attention's own factor (1/sqrt(D)); without it the softmax of most blocks
    is exactly 0, and which of these are chosen is chance.
    """

    fusion: float = 0.25
    small: ClassVar[Mapping[str, Any]] = {"segment": 8, "block": 4, "budget": 8, "threshold": 8}

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.fusion < 1:
            raise RecipeError(
                f"prefill.sparse.critiprefill: fusion is {self.fusion}; give a fraction of at least 0 and below 1"
            )

    def score(self, queries: Tensor, high: Tensor, low: Tensor, scale: float) -> Tensor:
        middle = (queries.amax(2) + queries.amin(2)) * (scale / 2)  # [B,H,D]
        groups = middle.unflatten(1, (high.shape[1], -1)).float()  # [B,G,R,D]
        best, worst = (groups @ x.float().transpose(-1, -2) for x in (high, low))  # [B,G,R,NB]
        return torch.maximum(best, worst).mean(2)

    def fuse(self, weights: Tensor, before: Tensor) -> Tensor:
        return self.fusion * before + (1 - self.fusion) * weights
