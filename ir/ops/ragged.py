"""Slots of heads that keep unequal numbers, one head's after another's: [B,1,M,…], by `counts` [B,G]. The slots of
head g are the counts[:, g] after those of the heads before it; what a row has beyond its last is empty.
"""

from __future__ import annotations

from torch import Tensor


def places(counts: Tensor, ranks: Tensor) -> tuple[Tensor, Tensor]:
    """Where slot number ranks [P] of each head lies [B,G,P], and whether there is one; 0 where there is none."""
    counts = counts[..., None]
    starts = counts.cumsum(1) - counts
    real = ranks < counts
    return (starts + ranks).masked_fill(~real, 0), real


def spread(flat: Tensor, where: Tensor) -> Tensor:
    """flat [B,1,M,…] and where [B,G,P] -> [B,G,P,…]."""
    flat = flat[:, 0]
    index = where.flatten(1)
    for size in flat.shape[2:]:
        index = index[..., None].expand(*[-1] * index.dim(), size)
    found: Tensor = flat.gather(1, index).unflatten(1, where.shape[1:])
    return found


def owned(counts: Tensor, slots: Tensor) -> Tensor:
    """Which of the slots 0..M-1 [M] are each head's: bool [B,G,M]."""
    ends = counts.cumsum(1)[..., None]
    return (slots < ends) & (slots >= ends - counts[..., None])


def ranked(counts: Tensor, slots: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of the slots 0..M-1 [M]: whose each is, which of its slots, and whether it is one's [B,M]; 0, 0 where not."""
    ends = counts.cumsum(1)
    owner = (slots >= ends[..., None]).long().sum(1)
    real = owner < counts.shape[1]
    owner = owner.masked_fill(~real, 0)
    rank = slots - (ends - counts).gather(1, owner)
    return owner, rank.masked_fill(~real, 0), real
