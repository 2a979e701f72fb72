"""Rows of a matrix in groups of bounded size: k-means, in which a full group sends rows to the next one."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

ROUNDS = 8
SAMPLED = 64  # rows for each centroid, by which centroids are found
AT_ONCE = 4096  # rows whose distances are worked out together
NEXT = 16  # centroids that a row may go to, the nearest first


def codebook(rows: Tensor, count: int, most: int, progress: Callable[[str, float], None]) -> Tensor:
    """The group of each row [V] of rows [V,E] in float32, out of `count`; none has more than `most` rows.

    `most` times `count` is at least V. The same rows give the same groups.
    """
    order = torch.Generator().manual_seed(0)
    sample = rows[torch.randperm(len(rows), generator=order)[: SAMPLED * count]]
    centres = sample[:count].clone()
    for number in range(ROUNDS):
        progress("grouping rows of the head", number / (ROUNDS + 1))
        nearest = _nearest(sample, centres, 1)[:, 0]
        sums = torch.zeros_like(centres).index_add_(0, nearest, sample)
        sizes = torch.bincount(nearest, minlength=count)[:, None]
        centres = torch.where(sizes > 0, sums / sizes.clamp(min=1), centres)
    return _filled(_nearest(rows, centres, min(NEXT, count)), count, most)


def of_groups(rows: Tensor, group: Tensor, count: int) -> Tensor:
    """The mean of each group's rows [K,E], of rows [V,E]; 0 where a group is empty."""
    sums = torch.zeros(count, rows.shape[1]).index_add_(0, group, rows)
    return sums / torch.bincount(group, minlength=count).clamp(min=1)[:, None]


def members(group: Tensor, count: int) -> Tensor:
    """The rows of each group [K,M], ascending; a group with fewer repeats its last one, an empty one row 0."""
    order = group.sort(stable=True)
    sizes = torch.bincount(group, minlength=count)
    first = sizes.cumsum(0) - sizes
    place = torch.arange(int(sizes.max()))[None].minimum((sizes - 1).clamp(min=0)[:, None])
    found = order.indices[(first[:, None] + place).clamp(max=len(group) - 1)]
    return torch.where(sizes[:, None] > 0, found, 0)


def _nearest(rows: Tensor, centres: Tensor, count: int) -> Tensor:
    """The nearest centroids of each row [V,count]."""
    half = centres.square().sum(1) / 2
    found = [(part @ centres.mT - half).topk(count).indices for part in rows.split(AT_ONCE)]
    return torch.cat(found)


def _filled(wishes: Tensor, count: int, most: int) -> Tensor:
    """A group for each row [V]: the first of its wishes [V,n] that has room, in the rows' order, or the emptiest."""
    group = torch.full((len(wishes),), -1)
    room = torch.full((count,), most)
    for wish in wishes.T:
        waits = (group < 0).nonzero()[:, 0]
        order = wish[waits].sort(stable=True)
        sizes = torch.bincount(order.values, minlength=count)
        place = torch.arange(len(waits)) - (sizes.cumsum(0) - sizes)[order.values]
        fits = place < room[order.values]
        group[waits[order.indices[fits]]] = order.values[fits]
        room -= torch.bincount(order.values[fits], minlength=count)
    rest = (group < 0).nonzero()[:, 0]
    group[rest] = torch.arange(count).repeat_interleave(room)[: len(rest)]
    return group
