"""PBS-Attn (arXiv:2510.21270): blocks of keys that are sorted by attention within each segment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from accel.ir.axis import option
from accel.ir.ops.attention import Form
from accel.passes.prefill.sparse import Base
from accel.passes.prefill.sparse._inputs import LOWEST, mean_queries, share_before


@dataclass(frozen=True)
class PbsAttn(Base):
    """Attention of a segment's last `observe` queries to earlier keys orders the keys of each earlier segment. Blocks
    are cut from that order. For each block of queries, blocks are ranked by the softmax of mean query times mean keys;
    the shortest prefix with `share` of it is read, and the block with the prompt's first token. Up to the budget, the
    blocks that any query head and block of queries ranks first come first.

    The order is per KV head, by the mean over its heads (in the paper, per query head, over copies of the keys). The
    cache keeps the prompt's order. The paper's segments have 256 tokens; estimates cost half as much in those of 512.
    """

    block: int = 128
    budget: int = 4096
    share: float = option(0.9, above=0, most=1)
    observe: int = option(128, least=1, most=4096)

    orders: ClassVar[bool] = True
    small: ClassVar[Mapping[str, Any]] = {
        "segment": 8, "block": 4, "budget": 8, "threshold": 8, "observe": 4
    }  # fmt: skip

    def summary(self, blocks: Tensor) -> dict[str, Tensor]:
        return {"mean": blocks.float().mean(3)}

    def order(self, logits: Tensor, earlier: Tensor, form: Form) -> Tensor:
        seen = torch.nan_to_num(logits, nan=LOWEST).masked_fill(
            ~earlier[:, None, None, None], LOWEST
        )
        return form.shares(seen).mean((2, 3))

    def score(
        self, queries: Tensor, mean: Tensor, slots: Tensor, past: Tensor, form: Form
    ) -> Tensor:
        groups, blocks = mean.shape[1], mean.shape[2]
        rows = mean_queries(queries, self.block, self.segment // self.block)  # [B,H,J,D]
        rows = rows.unflatten(1, (groups, -1)).flatten(2, 3)  # [B,G,R·J,D]
        logits = form.logits(rows @ mean.transpose(-1, -2))  # [B,G,R·J,NB]
        logits = torch.nan_to_num(logits, nan=LOWEST).masked_fill(~past[:, None, None], LOWEST)
        before = share_before(logits.softmax(-1)).amin(2)  # [B,G,NB]
        first = (slots.unflatten(2, (blocks, self.block)) == 0).any(3)
        worth = (1 - before).masked_fill(first, 2.0)
        return worth if self.share == 1 else worth.masked_fill(worth <= 1 - self.share, -torch.inf)
