"""Choosing tokens of a cache by the units that they are in."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from accel.ir.ops.op import Op


def _best_tokens(worth: Tensor, label: Tensor, seen: Tensor, count: int) -> Tensor:
    units, slots = worth.shape[3], label.shape[2]
    worth = torch.where(worth.isnan(), math.inf, worth)  # no number: attention shall see it
    order = worth.sort(dim=3, descending=True, stable=True).indices
    numbers = torch.arange(units, device=worth.device).expand(order.shape)
    rank = torch.zeros_like(order).scatter(3, order, numbers)
    label = label.clamp(0, units - 1)[:, :, None].expand(-1, -1, worth.shape[2], -1)
    key = rank.gather(3, label) * slots + torch.arange(slots, device=worth.device)
    key = key.masked_fill(~seen, units * slots)
    best, listed = key.topk(min(count, slots), dim=3, largest=False)
    return F.pad(
        listed.masked_fill(best == units * slots, -1), (0, max(0, count - slots)), value=-1
    )


# worth [B,G,T,M] of units, the unit that each slot's token is in label [B,G,C], the slots that each token may choose
# seen bool [B,1 or G,T,C] -> the slots of the best units [B,G,T,count]: unit after unit, the earlier one of equals,
# each in the order of its slots, the last one cut; -1 where there are fewer. NaN is worth most.
best_tokens = Op(
    "best_tokens",
    "(Tensor worth, Tensor label, Tensor seen, int count) -> Tensor",
    reference=_best_tokens,
    shape=lambda worth, label, seen, count: worth.new_empty(
        (*worth.shape[:3], count), dtype=torch.int64
    ),
)


def _units_seen(label: Tensor, seen: Tensor, units: Any) -> Tensor:
    batch, groups, _ = label.shape
    index = label[:, :, None].clamp(0, units - 1).expand(-1, -1, seen.shape[2], -1)
    found = torch.zeros((batch, groups, seen.shape[2], units), device=label.device)
    return found.scatter_add(3, index, seen.float().expand(-1, groups, -1, -1)) > 0


# The unit that each slot's token is in label [B,G,C], the slots that each token may choose seen bool [B,1,T,C] -> which
# of so many units have such a slot: bool [B,G,T,units].
units_seen = Op(
    "units_seen",
    "(Tensor label, Tensor seen, SymInt units) -> Tensor",
    reference=_units_seen,
    shape=lambda label, seen, units: seen.new_empty(
        (label.shape[0], label.shape[1], seen.shape[2], units)
    ),
)
