"""Slots of a layer's heads: segments of their tokens, the same token in several heads, stretches that are written."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad


def places(positions: Tensor) -> Tensor:
    """Which token of its head a slot holds, in the order of slots; an empty slot has the number of slots [B,G,S]."""
    real = positions >= 0
    beyond = torch.ones_like(positions).sum(2, keepdim=True)
    return torch.where(real, real.long().cumsum(2) - 1, beyond)


def in_order(x: Tensor, place: Tensor) -> Tensor:
    """Values [B,G,S] with those of tokens first, in their order; 0 behind them."""
    return torch.zeros_like(pad(x, (0, 1))).scatter(2, place, x)[..., :-1]


def sums(x: Tensor, segment: Tensor) -> Tensor:
    """The sum of each slot's segment, by the number of the segment, 0 to S [B,G,S]."""
    total = torch.zeros_like(pad(x, (0, 1))).scatter_add(2, segment, x)
    return total.gather(2, segment)


def ranks_of(scores: Tensor) -> Tensor:
    """The place of each slot along the last axis, the highest score first, of equal scores the newest."""
    order = scores.flip(-1).sort(stable=True, dim=-1, descending=True).indices
    return order.sort(-1).indices.flip(-1)


def mean_of_heads(x: Tensor, positions: Tensor) -> Tensor:
    """The mean over the heads that hold the same token in the same slot [B,G,S]: after heads kept tokens of their own,
    each slot is mostly of its head alone.
    """
    same = same_token(positions).to(x.dtype)
    return (same * x[:, None]).sum(2) / same.sum(2).clamp(min=1)


def same_token(positions: Tensor) -> Tensor:
    """Whether a slot of two heads holds the same token [B,G,G,S]."""
    return (positions[:, :, None] == positions[:, None]) & (positions >= 0)[:, :, None]


def written(old: Tensor, new: Tensor, at: Tensor, end: Tensor) -> Tensor:
    """old [B,G,S,…], whose entries at [B,1] .. end - 1 are those of new [B,G,N,…]."""
    ahead = torch.arange(old.shape[2], device=old.device) - at  # [B,S]
    index = ahead.clamp(min=0, max=new.shape[2] - 1)
    here = (ahead >= 0) & (ahead < end - at)
    shape = (*here.shape[:1], 1, -1, *[1] * (old.dim() - 3))
    index, here = index.reshape(shape), here.reshape(shape)
    return torch.where(here, new.gather(2, index.expand(old.shape)), old)
