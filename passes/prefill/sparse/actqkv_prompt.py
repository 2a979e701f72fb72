"""ActQKV (arXiv:2502.13542) in prompts: a segment reads the blocks of keys that are like its probe query."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from accel.ir.axis import option
from accel.ir.errors import RecipeError
from accel.passes.prefill.sparse import Base

_ALWAYS = 2.0  # above every cosine


@dataclass(frozen=True)
class ActqkvPrompt(Base):
    """A segment's probe query is the mean of its queries, each weighted by how unusual it is: the mean over all numbers
    of (x - mean)² / (variance + mean variance / 100). A block's vector is the mean of its `best` keys in each KV head,
    and it is worth its cosine with the probe query, over all heads together: a layer has one list. The first `sinks`
    and the newest `window` tokens before the segment are always read, and count in the budget.

    Mean and variance are those of the segment's own queries; the paper's are of all queries so far. The `best` keys are
    those with the largest product with the segment's mean query; the paper takes those that drew most attention of the
    tokens behind them, keeps keys without positions, shares a budget between layers by density, and adds the question
    to the probe where it is known. `kv.select = actqkv` chooses where text is generated.
    """

    segment: int = 256
    sinks: int = option(64, least=0, multiple_of="block")
    window: int = option(512, least=0, multiple_of="block")
    best: int = option(4, least=1, most=1024)

    lacks = "statistics of all queries so far; budgets shared between layers"
    small: ClassVar[Mapping[str, Any]] = {
        "segment": 8, "block": 4, "budget": 8, "threshold": 8, "sinks": 0, "window": 4, "best": 2,
    }  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sinks + self.window >= self.budget:
            raise RecipeError(
                f"{self.full_name}: sinks + window = {self.sinks + self.window}; give less than budget = {self.budget}"
            )

    def summary(self, blocks: Tensor) -> dict[str, Tensor]:
        """The keys themselves, of which a segment's mean query says which are a block's best."""
        return {"blocks": blocks}

    def score(self, queries: Tensor, blocks: Tensor, past: Tensor) -> Tensor:
        """See Base: [B,G,NB], the same of all groups."""
        groups, size, width = blocks.shape[1], blocks.shape[3], blocks.shape[4]
        by_group = queries.float().unflatten(1, (groups, queries.shape[1] // groups))  # [B,G,R,T,D]
        vectors = self.vectors(blocks.float(), by_group.mean((2, 3)), min(self.best, size), width)
        probe = self.probe(queries.float().transpose(1, 2))  # [B,H,D]
        asked = probe.unflatten(1, (groups, probe.shape[1] // groups))  # [B,G,R,D]
        product = (asked @ vectors.transpose(-1, -2)).sum((1, 2))  # [B,NB]
        length = (vectors.square().sum((1, 3)) * asked.shape[2]).sqrt()  # over all query heads
        length = length * probe.square().sum((1, 2)).sqrt()[:, None]
        like = product / length.clamp(min=1e-12)
        number = torch.arange(past.shape[1], device=past.device)
        newest = past.sum(1, keepdim=True) - self.window // self.block
        always = (number < self.sinks // self.block) | (number >= newest)
        worth = torch.where(always, _ALWAYS, like)[:, None]
        return worth.expand(-1, groups, -1)

    def probe(self, queries: Tensor) -> Tensor:
        """The probe query [B,H,D] of queries [B,T,H,D]."""
        weights = self.unusual(queries)  # [B,T]
        total = weights.sum(1, keepdim=True)
        weights = torch.where(total > 0, weights, torch.ones_like(weights))  # all queries are one
        shares = weights / weights.sum(1, keepdim=True)
        return (shares[..., None, None] * queries).sum(1)

    def unusual(self, queries: Tensor) -> Tensor:
        """How far each of queries [B,T,H,D] is from their mean, by their variance: [B,T]."""
        far = (queries - queries.mean(1, keepdim=True)).square()
        variance = far.mean(1, keepdim=True)
        floor = variance.mean((2, 3), keepdim=True) / 100
        return (far / (variance + floor).clamp(min=1e-12)).mean((2, 3))

    @staticmethod
    def vectors(blocks: Tensor, mean: Tensor, best: int, width: int) -> Tensor:
        """[B,G,NB,D]: the mean of each block's keys [B,G,NB,block,D] with the largest products with a mean query
        [B,G,D].
        """
        like = (blocks * mean[:, :, None, None]).sum(4)
        index = torch.nan_to_num(like).topk(best, dim=3).indices
        chosen = blocks.gather(3, index[..., None].expand(-1, -1, -1, -1, width))
        return chosen.mean(3)
