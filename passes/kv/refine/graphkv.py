"""GraphKV (arXiv:2509.00388): the best tokens lower the scores of those whose keys are like theirs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from accel.ir.axis import option
from accel.passes.kv.refine import Base
from accel.passes.kv.refine._ranks import above_zero

_LEAST = 1e-6  # what is left of a score whose key is a source's own


@dataclass(frozen=True)
class GraphKV(Base):
    """In each of `rounds` rounds the best tokens are sources, `share` as many as a head keeps. The `neighbours` keys
    most similar to a source's lose: their scores are multiplied by 1 - cosine (those of negative cosine lose
    nothing). `neighbours`: 0: tokens kept over sources, so that edges are as many as tokens kept; -1: all keys.

    Scores below 0 are counted from the lowest. Protected tokens are sources by their own score. The paper leaves the
    number of neighbours open.
    """

    share: float = option(0.3, least=0.001, most=1)
    neighbours: int = option(0, least=-1, most=4096)
    rounds: int = option(1, least=0, most=16)
    small: ClassVar[Mapping[str, Any]] = {"share": 0.5}

    def __call__(
        self, scores: Tensor, keys: Tensor, positions: Tensor, counts: Tensor, ranks: Tensor
    ) -> Tensor:
        part = round(self.share * 1000)
        most = (ranks.shape[0] * part + 999) // 1000  # sources of any head
        sources = ((counts * part + 999) // 1000)[..., None]  # [B,G,1]
        real = positions >= 0
        unit = keys.float().nan_to_num(posinf=0.0, neginf=0.0)
        unit = unit / unit.norm(dim=-1, keepdim=True).clamp(min=1e-30)
        slot = torch.ones_like(positions).cumsum(2) - 1
        for _ in range(self.rounds):
            scores = above_zero(scores)
            chosen = scores.masked_fill(~real, -1).topk(most, dim=2).indices  # [B,G,K]
            source = (torch.ones_like(chosen).cumsum(2) <= sources) & real.gather(2, chosen)
            index = chosen[..., None].expand(-1, -1, -1, unit.shape[3])
            edges = unit.gather(2, index) @ unit.transpose(2, 3)  # [B,G,K,S]
            linked = source[..., None] & real[:, :, None] & (chosen[..., None] != slot[:, :, None])
            edges = edges.clamp(min=0).masked_fill(~linked, 0)
            scores = scores * self._decay(edges, counts, sources)
        return scores

    def _decay(self, edges: Tensor, counts: Tensor, sources: Tensor) -> Tensor:
        """Edges [B,G,K,S] -> what each score is multiplied by [B,G,S]."""
        if self.neighbours < 0:
            return (1 - edges).clamp(min=_LEAST).log().sum(2).exp()
        widest = self.neighbours or -(-1000 // round(self.share * 1000))
        near, where = pad(edges, (0, widest)).topk(widest, dim=3)  # [B,G,K,M]
        if not self.neighbours:
            each = -(-counts[..., None] // sources.clamp(min=1))[..., None]  # [B,G,1,1]
            near = near.masked_fill(torch.ones_like(where).cumsum(3) > each, 0)
        decay = (1 - near).clamp(min=_LEAST).log()
        total = torch.zeros_like(pad(edges[:, :, 0], (0, widest)))
        total = total.scatter_add(2, where.flatten(2), decay.flatten(2))
        return total.exp()[..., : edges.shape[3]]
