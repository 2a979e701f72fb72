"""SubGen (arXiv:2402.06082): evicted tokens enter a sketch of fixed size, which estimates what they add to attention:
clusters of keys with samples for the sum of weights, and tokens drawn by the norm of their values for the weighted sum.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from accel.ir.axis import option
from accel.ir.ops.centres import farthest_first
from accel.ir.ops.noise import gumbel, uniform
from accel.passes.kv.keep import Absorbed, Base

_LEAST = torch.finfo(torch.float32).min
_NONE = -1e30  # the logarithm of a weight of nothing
_SMALL = 1e-20


@dataclass(frozen=True)
class SubGen(Base):
    """`clusters`: of keys, each with `samples` of its members, drawn alike. `slots`: tokens, each drawn with a
    probability that goes by the square of its value's norm. Both are drawn anew as tokens come, so that each sum is
    right in the mean. Draws are a hash of the token's position, the head and `seed`.

    The paper opens a cluster where a key is farther than a radius from all. Here the number is fixed: the keys of an
    eviction that cover the others (k-centre) open the clusters that are free, and the rest join the nearest one.
    """

    clusters: int = option(64, least=1, most=4096)
    samples: int = option(2, least=1, most=64)
    slots: int = option(128, least=1, most=4096)
    seed: int = option(0, least=0)

    lacks = "a number of clusters that grows by a radius"
    merges: ClassVar[bool] = False
    absorbs: ClassVar[bool] = True
    small: ClassVar[Mapping[str, Any]] = {"clusters": 3, "samples": 2, "slots": 4}

    def __call__(self, values: Tensor, chosen: Tensor) -> Tensor:
        return values.gather(2, chosen[..., None].expand(-1, -1, -1, values.shape[3]))

    def absorbed(self, width: int, value_width: int) -> Absorbed:
        """`centres` and `members` are keys, `sizes` counts tokens; `drawn` holds keys and values, `norms` the sum of
        squares of their norms.
        """
        return {
            "centres": (self.clusters, width),
            "sizes": (self.clusters,),
            "members": (self.samples, self.clusters, width),
            "drawn": (self.slots, width + value_width),
            "norms": (1,),
        }

    def absorb(
        self,
        centres: Tensor,
        sizes: Tensor,
        members: Tensor,
        drawn: Tensor,
        norms: Tensor,
        keys: Tensor,
        values: Tensor,
        positions: Tensor,
        gone: Tensor,
    ) -> dict[str, Tensor]:
        """A token with a number that is not finite leaves nothing."""
        fine = gone & keys.sum(3).isfinite() & values.sum(3).isfinite()
        k = torch.where(fine[..., None], keys, 0.0).float()
        v = torch.where(fine[..., None], values, 0.0).float()
        head = torch.ones_like(positions[:1, :, :1]).cumsum(1)  # [1,G,1]
        centres, real = self._opened(centres, sizes, k, fine)
        nearest = _distances(k, centres, real).argmin(3)  # [B,G,S]
        own = torch.ones_like(sizes).cumsum(2).long() - 1  # [B,G,M]
        joins = (nearest[:, :, None] == own[..., None]) & fine[:, :, None]  # [B,G,M,S]
        new = joins.sum(3).to(sizes.dtype)
        after = sizes + new
        newest = torch.where(fine, positions, -1).amax(2, keepdim=True)  # [B,G,1]
        kept = []
        for i in range(self.samples):
            luck = gumbel(self.seed + 2 * i, head, positions)  # [B,G,S]
            first = luck[:, :, None].masked_fill(~joins, _NONE).argmax(3)  # [B,G,M]
            found = k.gather(2, first[..., None].expand(-1, -1, -1, k.shape[3]))
            chance = uniform(self.seed + 2 * i + 1, head, newest, own)
            moves = chance * after < new
            kept.append(torch.where(moves[..., None], found, members[:, :, i]))
        weight = v.square().sum(3)  # [B,G,S]
        more = norms + weight.sum(2, keepdim=True)
        slot = torch.ones_like(drawn[:1, :1, :, 0]).cumsum(2).long()[..., None]  # [1,1,N,1]
        luck = gumbel(self.seed + 1000, head[..., None], positions[:, :, None], slot)
        score = luck + weight.clamp(min=1e-30).log()[:, :, None]  # [B,G,N,S]
        first = score.masked_fill((weight <= 0)[:, :, None], _NONE).argmax(3)
        both = torch.cat((k, v), dim=3)
        found = both.gather(2, first[..., None].expand(-1, -1, -1, both.shape[3]))
        chance = uniform(self.seed + 1001, head, newest, slot[..., 0])
        moves = chance * more < weight.sum(2, keepdim=True)
        return {
            "centres": centres,
            "sizes": after,
            "members": torch.stack(kept, dim=2),
            "drawn": torch.where(moves[..., None], found, drawn),
            "norms": more,
        }

    def _opened(
        self, centres: Tensor, sizes: Tensor, k: Tensor, fine: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Centres, of which those without a member are taken by keys that come; and which have a key now [B,G,M]."""
        live = sizes > 0
        apart = _distances(k, centres, live) + k.square().sum(3, keepdim=True)
        number = torch.full((), self.clusters, dtype=torch.int64, device=k.device)
        order = farthest_first(k, fine, apart.amin(3).clamp(min=0), number)
        slots = torch.cat((order, torch.full_like(sizes, -2.0)), dim=2)  # as many at least
        best, index = slots.topk(self.clusters, dim=2)
        free = ((~live).long().cumsum(2) - 1).clamp(min=0)  # which of those that are free
        takes = ~live & (best.gather(2, free) >= 1)
        padded = torch.cat((k, torch.zeros_like(centres)), dim=2)
        index = index.gather(2, free)[..., None].expand(-1, -1, -1, k.shape[3])
        return torch.where(takes[..., None], padded.gather(2, index), centres), live | takes

    def read(
        self,
        queries: Tensor,
        scale: float,
        softcap: float,
        sizes: Tensor,
        members: Tensor,
        drawn: Tensor,
        norms: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """The estimate of the weighted sum over that of the weights, and the logarithm of the latter."""
        repeat, width = queries.shape[1] // sizes.shape[1], queries.shape[3]
        rows = queries.float().unflatten(1, (-1, repeat)).flatten(2, 3)  # [B,G,R T,D]
        count = sizes[:, :, None].expand(-1, -1, self.samples, -1).flatten(2)[:, :, None]
        below = _scores(rows, members.flatten(2, 3), scale, softcap)  # [B,G,R T,samples M]
        share = (count.clamp(min=1) / self.samples).log()
        below = torch.where(count > 0, below + share, _NONE)
        value = drawn[..., width:]
        norm = value.square().sum(3)[:, :, None]  # [B,G,1,N]
        above = _scores(rows, drawn[..., :width], scale, softcap)
        share = (norms[:, :, None] / (self.slots * norm.clamp(min=_SMALL))).clamp(min=_SMALL).log()
        above = torch.where(norm > 0, above + share, _NONE)
        top = torch.maximum(below.amax(3, keepdim=True), above.amax(3, keepdim=True))
        total = (below - top).exp().sum(3, keepdim=True).clamp(min=_SMALL)
        found = ((above - top).exp() @ value) / total
        some = (sizes.sum(2) > 0)[:, :, None, None]
        lse = torch.where(some, top + total.log(), _LEAST)
        found = torch.where(some, found, 0.0)
        found, lse = (x.unflatten(2, (repeat, -1)).flatten(1, 2) for x in (found, lse))
        return found, lse[..., 0]


def _scores(rows: Tensor, keys: Tensor, scale: float, softcap: float) -> Tensor:
    scores = rows @ keys.transpose(2, 3) * scale
    return torch.tanh(scores / softcap) * softcap if softcap else scores


def _distances(x: Tensor, centres: Tensor, real: Tensor) -> Tensor:
    """Squared, but for what is the same for all centres: [B,G,S,M]; infinite to those that are not real."""
    apart = centres.square().sum(3)[:, :, None] - 2 * (x @ centres.transpose(2, 3))
    return apart.masked_fill(~real[:, :, None], torch.inf)
