"""FreqKV (arXiv:2505.00570): a full cache becomes shorter along its tokens, of which only low frequencies stay."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from accel.ir.axis import option
from accel.passes.kv._shared.slots import places
from accel.passes.kv.keep import Base


@dataclass(frozen=True)
class FreqKV(Base):
    """The first `sinks` tokens and the last `recent` stay as they are. Of the N between, channel by channel, the first
    N' coefficients of a cosine transform (DCT-II) are turned back into N' keys, which were not rotated, and N' values,
    so many that the budget is filled. Constants stay what they are. Tokens made so are among the N of the next time.

    Keys are rotated to their places in the cache, which the next token follows, so text may outgrow the positions that
    the model knows. The scores choose nothing.

    With `kv.when = full` a cache of C slots is turned into low frequencies each time that it is full. After a call
    it holds fewer than C tokens; until it is full for the first time a row is the model's own.
    """

    sinks: int = option(8, least=0)
    recent: int = option(0, least=0)
    adds: ClassVar[bool] = True  # weights of either sign
    moves: ClassVar[bool] = True
    makes: ClassVar[bool] = True
    small: ClassVar[Mapping[str, Any]] = {"sinks": 2}

    def __call__(
        self, keys: Tensor, values: Tensor, positions: Tensor, real: Tensor, ranks: Tensor
    ) -> tuple[Tensor, Tensor]:
        before, after = (positions >= 0).sum(2)[..., None], real.sum(2)[..., None]  # [B,G,1]
        sinks = after.clamp(max=self.sinks)
        ends = sinks + (after - sinks).clamp(max=self.recent)
        many, few = (before - ends)[..., None], (after - ends)[..., None]  # N, N' [B,G,1,1]
        place = places(positions)  # [B,G,S]
        ahead = _cosines(ranks[:, None], (place - sinks)[:, :, None], many, few)  # [B,G,N',S]
        back = _cosines(ranks, (ranks - sinks)[..., None], few, few)  # [B,G,N',N']
        back = back * (few / many.clamp(min=1)).sqrt()
        own = (ranks < sinks) | (ranks >= sinks + few[..., 0])  # [B,G,N]
        taken = torch.where(ranks < sinks, ranks, ranks + (before - after).clamp(min=0))
        order = place.sort(dim=2, stable=True).indices  # slots in the order of their tokens
        taken = order.gather(2, taken.clamp(max=order.shape[2] - 1))
        found = []
        for x in (keys, values):
            there = torch.where((positions >= 0)[..., None], x, 0).float()
            kept = x.gather(2, taken[..., None].expand(-1, -1, -1, x.shape[3]))
            found.append(torch.where(own[..., None], kept, back @ (ahead @ there)))
        return found[0], found[1]


def _cosines(frequency: Tensor, time: Tensor, length: Tensor, most: Tensor) -> Tensor:
    """The orthonormal DCT-II of `length`: of the first `most` frequencies, and of times that there are; else 0."""
    size = length.clamp(min=1)
    turn = (2 * time + 1) * frequency % (4 * size)  # whole numbers: no angle is large
    wave = (turn.float() * (math.pi / 2) / size).cos() * (2.0 / size).sqrt()
    wave = torch.where(frequency == 0, wave * math.sqrt(0.5), wave)
    there = (frequency < most) & (time >= 0) & (time < length)
    return torch.where(there, wave, 0)
