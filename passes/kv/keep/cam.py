"""CaM: Cache Merging for Memory-efficient LLMs Inference (ICML 2024). The value of an evicted token is spread over the
next kept ones, the likelier the more attention it drew.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from accel.ir.axis import option
from accel.ir.invariants import Invariant
from accel.ir.ops.noise import uniform
from accel.passes.kv.keep import Base


@dataclass(frozen=True)
class CaM(Base):
    """`window`: number of kept tokens after an evicted one that share its value. It is merged with the probability
    of its attention by their mean attention, at most 1. Keys are unchanged.

    Attention is that of generated tokens, so nothing is merged before the first. The draw is a hash of the token's
    position, the head and `seed`.

    A call of one token counts as a generated one, so prompts run whole.
    """

    window: int = option(32, least=1, most=4096)
    seed: int = option(0, least=0)

    relies = frozenset({Invariant.ALL_LAYERS_RUN, Invariant.FULL_ATTENTION})
    breaks = Base.breaks | {Invariant.REWIND}
    adds: ClassVar[bool] = True
    small: ClassVar[Mapping[str, Any]] = {"window": 3}

    def __call__(
        self, values: Tensor, decode_mass: Tensor, positions: Tensor, chosen: Tensor, real: Tensor
    ) -> Tensor:
        stays = torch.zeros_like(positions).scatter(2, chosen, real.long())  # [B,G,S]
        behind = stays.cumsum(2) - stays  # kept tokens before each slot: the rank of the next
        total = real.sum(2, keepdim=True)
        end = torch.minimum(behind + self.window, total)
        share = (end - behind).clamp(min=1)
        drawn = (decode_mass.gather(2, chosen) * real).nan_to_num()  # [B,G,N]
        before = torch.cat((torch.zeros_like(drawn[..., :1]), drawn.cumsum(2)), dim=2)
        mean = (before.gather(2, end) - before.gather(2, behind)) / share
        # an attention of 0 by a mean of 0 merges nothing
        likely = torch.where(mean > 0, decode_mass / mean.clamp(min=1e-30), 1.0 * (decode_mass > 0))
        heads = torch.ones_like(positions[:1, :, :1]).cumsum(1)
        merges = uniform(self.seed, heads, positions) < likely.nan_to_num(nan=0.0)
        merges = merges & (stays == 0) & (positions >= 0) & (end > behind)
        part = torch.where(merges[..., None], values / share[..., None], 0.0)  # [B,G,S,D]
        index = [at[..., None].expand(-1, -1, -1, values.shape[3]) for at in (behind, end, chosen)]
        edges = torch.zeros_like(values[:, :, :1]).expand(-1, -1, chosen.shape[2] + 1, -1)
        edges = edges.scatter_add(2, index[0], part).scatter_add(2, index[1], -part)
        return values.gather(2, index[2]) + edges.cumsum(2)[:, :, :-1]
