"""Keys that cover others: the greedy choice of centres."""

from __future__ import annotations

import torch
from torch import Tensor

from accel.ir.ops.op import Op

_FAR = torch.finfo(torch.float32).max


def _farthest_first(x: Tensor, real: Tensor, nearest: Tensor, count: Tensor) -> Tensor:
    real = real & x.isfinite().all(-1)
    x = torch.where(real[..., None], x, 0.0).float()
    distance = torch.where(real, nearest.clamp(max=_FAR), -1.0)
    steps = int(count)
    order = torch.zeros_like(distance)
    slots = torch.arange(x.shape[2], device=x.device)
    for step in range(steps):
        best = distance.argmax(2, keepdim=True)  # of equals the first
        here = (slots == best) & (distance >= 0)
        order = torch.where(here, float(steps - step), order)
        centre = x.gather(2, best[..., None].expand(-1, -1, -1, x.shape[3]))
        apart = (x - centre).square().sum(-1)
        distance = torch.where(here, -1.0, torch.minimum(distance, apart))
    away = distance.clamp(min=0)
    return torch.where(order > 0, order, torch.where(real, away / (1 + away), -1.0))


# x [B,G,S,D], which of them are real [B,G,S] bool, nearest [B,G,S] (squared distance to the nearest centre there is;
# inf: none yet), count [] int64 -> [B,G,S] float32: N..1 for those that are taken as centres, first to last, each time
# the real one that is farthest from all centres (of equals the first); for others a number below 1, the larger the
# farther they are; -1 for those that are not real, or not finite.
farthest_first = Op(
    "farthest_first",
    "(Tensor x, Tensor real, Tensor nearest, Tensor count) -> Tensor",
    reference=_farthest_first,
    shape=lambda x, real, nearest, count: x.new_empty(x.shape[:3], dtype=torch.float32),
)
