"""FlexPrefill (arXiv:2502.20766): each head's pattern and number of blocks follow from the prompt."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from accel.ir.axis import option
from accel.ir.errors import RecipeError
from accel.ir.ops.attention import Form
from accel.passes.prefill.sparse import Base
from accel.passes.prefill.sparse._inputs import (
    LOWEST,
    best_of_next,
    diagonals,
    last_queries,
    mean_queries,
    ranks,
    share_before,
)

_NONE = 1e9


@dataclass(frozen=True)
class FlexPrefill(Base):
    """Attention of a segment's last `observe` queries, summed along keys and along distances, gives two lists of blocks
    per query head, each as long as the tokens that hold `share` of it, and `least` tokens at least. If the attention of
    the mean query to mean keys is within `tau` of that attention, by the root of their Jensen-Shannon divergence, the
    head is query-aware: its lists have `least` tokens, and a third list has the pairs of mean queries and mean
    keys with `share` of the softmax.

    A KV head reads the union of its heads' lists, best ranks first, up to the budget, and the first block always. A
    block of distances is read by each block of queries of the segment.
    """

    block: int = 128
    budget: int = 4096
    share: float = option(0.9, above=0, most=1)
    tau: float = option(0.1, least=0, most=1)
    least: int = option(1024, least=0)
    observe: int = option(128, least=1, most=4096)
    small: ClassVar[Mapping[str, Any]] = {
        "segment": 8, "block": 4, "budget": 8, "threshold": 8, "observe": 4, "least": 4
    }  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.least > self.budget:
            raise RecipeError(
                f"{self.full_name}: least is {self.least}; give at most budget = {self.budget}"
            )

    def summary(self, blocks: Tensor) -> dict[str, Tensor]:
        return {"mean": blocks.float().mean(3)}

    def score(
        self,
        queries: Tensor,
        attention: Tensor,
        mean: Tensor,
        past: Tensor,
        first: Tensor,
        form: Form,
    ) -> Tensor:
        blocks, segment_blocks = mean.shape[2], self.segment // self.block
        vertical = _of_all(attention.mean(3))  # [B,G,R,C]
        slash = _of_all(diagonals(attention)[..., : vertical.shape[3]] / self.observe)
        columns = self._pooled(vertical, blocks)  # [B,G,R,NB]
        lines = self._pooled(slash, blocks)

        groups = mean.shape[1]
        number = torch.arange(blocks, device=mean.device)
        newest = torch.div(first, self.block, rounding_mode="floor")[:, None] + torch.arange(
            segment_blocks, device=mean.device
        )  # [B,J], the newest block that a block of queries reads
        causal = (number <= newest[..., None])[:, None, None]  # [B,1,1,J,NB]
        rows = mean_queries(queries, self.block, segment_blocks).unflatten(
            1, (groups, -1)
        )  # [B,G,R,J,D]
        table = _softmax(form.logits(rows @ mean[:, :, None].transpose(-1, -2)), causal)
        last = queries[:, :, last_queries(queries, self.observe)].float().mean(2)
        last = last.unflatten(1, (groups, -1))  # [B,G,R,D]
        estimate = _softmax(form.logits(last @ mean.transpose(-1, -2)), causal[:, :, :, -1])
        aware = _divergence(estimate, columns).sqrt() < self.tau  # [B,G,R]

        down = self._listed(columns, self._count(vertical, aware))
        along = -best_of_next(-self._listed(lines, self._count(slash, aware)), segment_blocks)
        flat = table.flatten(3)  # [B,G,R,J·NB]
        read = (share_before(flat) < self.share * segment_blocks) & aware[..., None]
        pairs = (
            torch.where(read, ranks(flat) / segment_blocks, _NONE)
            .unflatten(3, (segment_blocks, blocks))
            .amin(3)
        )
        need = torch.minimum(torch.minimum(down, along), pairs).amin(2)  # [B,G,NB]
        need = need.masked_fill(number == 0, -1.0)
        worth: Tensor = (-need).masked_fill(need >= _NONE, -torch.inf)
        return worth

    def _pooled(self, tokens: Tensor, blocks: int) -> Tensor:
        whole = tokens[..., : blocks * self.block].unflatten(-1, (blocks, self.block))
        total: Tensor = whole.sum(-1)
        return total

    def _count(self, tokens: Tensor, aware: Tensor) -> Tensor:
        """Blocks of a list [B,G,R] by the attention to tokens [B,G,R,C]."""
        least = -(-self.least // self.block)
        if self.share == 1:
            return torch.where(aware, least, tokens.shape[-1])
        best = tokens.topk(self.budget, dim=-1).values.cumsum(-1)  # no list is longer
        count = (best <= self.share).sum(-1) + 1
        blocks = torch.div(count, self.block, rounding_mode="floor") + 1
        return torch.where(aware, least, blocks.clamp(min=least))

    def _listed(self, blocks: Tensor, count: Tensor) -> Tensor:
        """The rank of each block, where the list has it."""
        place = ranks(blocks)
        return torch.where(place < count[..., None], place.float(), _NONE)


def _of_all(weights: Tensor) -> Tensor:
    """As shares of what all tokens [...,N] draw: a model's sink draws the rest."""
    return weights / weights.sum(-1, keepdim=True).clamp(min=1e-30)


def _softmax(logits: Tensor, seen: Tensor) -> Tensor:
    return torch.nan_to_num(logits, nan=LOWEST).masked_fill(~seen, LOWEST).softmax(-1)


def _divergence(p: Tensor, q: Tensor) -> Tensor:
    """Of Jensen and Shannon, in nats [...], of distributions [...,N]."""
    middle = (p + q) / 2
    parts = [x * (x.clamp(min=1e-30).log() - middle.clamp(min=1e-30).log()) for x in (p, q)]
    return ((parts[0] + parts[1]).sum(-1) / 2).clamp(min=0)
