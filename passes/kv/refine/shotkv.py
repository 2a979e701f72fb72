"""ShotKV (arXiv:2502.01941): the examples of a prompt are kept or dropped as wholes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from accel.passes.kv.refine import Base
from accel.passes.kv.refine._phases import frozen

_FAR = 1 << 40  # after every position


@dataclass(frozen=True)
class ShotKV(Base):
    """Units of the prompt, such as few-shot examples or sentences (`Session.mark`), stay in the order of the mean score
    of their tokens, over all heads of the layer, as long as they fit into what a head keeps; units with protected
    tokens first. A token outside all units is one by itself, and fills what room is left. Where not even the first
    unit fits, its newest tokens stay.

    Once the prompt is whole, it stays as it is, and generated tokens compete among themselves by their scores.
    """

    def __call__(
        self,
        scores: Tensor,
        positions: Tensor,
        units: Tensor,
        protected: Tensor,
        counts: Tensor,
        prompt: Tensor,
        seen: Tensor,
    ) -> Tensor:
        real = positions >= 0
        unit = _dense(torch.where(units >= 0, units + _FAR, positions).masked_fill(~real, 2 * _FAR))
        none = torch.zeros_like(scores).flatten(1)  # [B,GS], by unit
        size = none.scatter_add(1, unit.flatten(1), real.to(none.dtype).flatten(1))
        total = none.scatter_add(1, unit.flatten(1), scores.masked_fill(~real, 0).flatten(1))
        must = none.scatter_add(1, unit.flatten(1), (protected & real).to(none.dtype).flatten(1))
        worth = (total / size.clamp(min=1)).masked_fill(must > 0, torch.inf)
        worth = worth.masked_fill(size == 0, -torch.inf)
        order = worth.flip(1).sort(dim=1, descending=True, stable=True).indices
        order = torch.ones_like(order).sum(1, keepdim=True) - 1 - order  # of equal ones the last
        each = none[:, None].expand(-1, positions.shape[1], -1)
        sizes = each.scatter_add(2, unit, real.to(none.dtype))  # [B,G,GS]
        ahead = sizes.gather(2, order[:, None].expand_as(sizes)).long().cumsum(2)
        fits = (ahead <= counts[..., None]).all(1)
        place = order.sort(1).indices  # of each unit
        fits = fits.gather(1, place) | (place == 0) | (must > 0)

        def of(x: Tensor) -> Tensor:
            return x.gather(1, unit.flatten(1)).view_as(unit)

        ranked = torch.where(of(fits), 1.0, -1.0) * of(place + 1)
        ranked = torch.where(of(fits), 1 / ranked, ranked)
        ranked = ranked.masked_fill(~of(fits) & (units >= 0), -torch.inf)
        return torch.where((seen > prompt)[:, None, None], scores, ranked)

    def first(self, positions: Tensor, prompt: Tensor, seen: Tensor) -> Tensor:
        """See Base."""
        return frozen(positions, prompt, seen).float()


def _dense(key: Tensor) -> Tensor:
    """The rank of each key among the different ones of its row, from 0 on [B,G,S]."""
    ranked = key.flatten(1).sort(1)
    new = (ranked.values != pad(ranked.values, (1, 0), value=-1)[:, :-1]).long().cumsum(1) - 1
    return torch.zeros_like(new).scatter(1, ranked.indices, new).view_as(key)
