"""Writing into KV state."""

from __future__ import annotations

import torch
from torch import Tensor

from accel.ir.ops.op import Op


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


def _gather_blocks(pool: Tensor, table: Tensor) -> Tensor:
    found = pool[table.clamp(min=0)].transpose(1, 2)  # [B,G,M,E,..]
    return found.reshape(*found.shape[:2], table.shape[1] * pool.shape[2], *pool.shape[3:])


# pool [Z,G,E,..], table [B,M] of its blocks, -1: none (any numbers then) -> slots [B,G,M·E,..]
gather_blocks = Op(
    "gather_blocks",
    "(Tensor pool, Tensor table) -> Tensor",
    reference=_gather_blocks,
    shape=lambda pool, table: pool.new_empty(
        (table.shape[0], pool.shape[1], table.shape[1] * pool.shape[2], *pool.shape[3:])
    ),
)


def _block_positions(table: Tensor, heads: int, block: int) -> Tensor:
    slots = torch.arange(table.shape[1] * block, device=table.device)
    where = slots.masked_fill((table < 0).repeat_interleave(block, dim=1), -1)
    return where.unsqueeze(1).expand(-1, heads, -1).contiguous()


# table [B,M] of blocks of `block` tokens -> the position in each of their slots [B,heads,M·block]:
# block m holds m·block and what follows; -1 where there is none
block_positions = Op(
    "block_positions",
    "(Tensor table, int heads, int block) -> Tensor",
    reference=_block_positions,
    shape=lambda table, heads, block: table.new_empty(
        (table.shape[0], heads, table.shape[1] * block)
    ),
)
