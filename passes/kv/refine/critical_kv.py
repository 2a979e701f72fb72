"""CriticalKV (arXiv:2502.03805): scores times the norm of the values behind the output projection."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from accel.ir.axis import option
from accel.passes.kv._shared.slots import ranks_of
from accel.passes.kv.refine import Base
from accel.passes.kv.refine._ranks import above_zero


@dataclass(frozen=True)
class CriticalKV(Base):
    """The best `share` of what a head keeps stays by its score (at least one token), the others by (score + `epsilon`)
    times the L1 norm of their value behind the output projection, a mean over the heads of the group.

    Scores below 0 are counted from the lowest, since the paper has those of attention.
    """

    share: float = option(0.5, least=0, most=1)
    epsilon: float = option(1e-4, least=0)

    def __call__(
        self,
        scores: Tensor,
        protected: Tensor,
        counts: Tensor,
        positions: Tensor,
        values: Tensor,
        output: Tensor,
    ) -> Tensor:
        first = (counts * self.share).long().clamp(min=int(self.share > 0))[..., None]
        order = scores.masked_fill(protected, float("inf"))
        ranks = ranks_of(order.masked_fill(positions < 0, -float("inf")))
        moved = (above_zero(scores) + self.epsilon) * projected(values, output)
        most = moved.nan_to_num(0.0).amax(2, keepdim=True).clamp(min=1e-30)
        ahead = most * (2 - ranks / (ranks.amax(2, keepdim=True) + 1))  # in the order of the scores
        return torch.where(ranks < first, ahead, moved)


def projected(values: Tensor, output: Tensor) -> Tensor:
    """Values [B,G,S,D] -> the L1 norm behind the output projection [H,D,E], the mean of a group [B,G,S]."""
    groups = values.shape[1]
    heads = output.unflatten(0, (groups, -1)).float()  # [G,R,D,E]
    norms = [
        (values.float() @ heads[:, i]).abs().sum(-1) for i in range(heads.shape[1])
    ]  # one head at a time: [B,G,S,E] is large
    total: Tensor = norms[0]
    for norm in norms[1:]:
        total = total + norm
    return total / len(norms)
