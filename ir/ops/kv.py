"""Writing into KV state."""

from __future__ import annotations

import torch
from torch import Tensor

from accel.ir.op import Op


def _kv_append(buffer: Tensor, new: Tensor, slots: Tensor) -> Tensor:
    axis = 1 if buffer.dim() == 2 else 2
    index = slots.unsqueeze(1) + torch.arange(new.shape[axis], device=new.device)  # [B,T]
    if buffer.dim() > 2:
        index = index.view(index.shape[0], 1, -1, *[1] * (buffer.dim() - 3)).expand(new.shape)
    return buffer.scatter(axis, index, new)


# buffer [B,G,C,..], new [B,G,T,..] (or buffer [B,C], new [B,T]); row b fills the slots
# slots[b] .. slots[b]+T-1. A lowering may write in place: the old buffer is not read afterwards.
kv_append = Op(
    "kv_append",
    "(Tensor buffer, Tensor new, Tensor slots) -> Tensor",
    reference=_kv_append,
    shape=lambda buffer, new, slots: buffer.new_empty(buffer.shape),
)
