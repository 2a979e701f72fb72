"""Choosing by token: position tables, the rows that get logits, embeddings that stand for tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from accel.ir.ops.op import Op


def _lookup(table: Tensor, positions: Tensor) -> Tensor:
    return table[positions.clamp(min=0)]


def _take_rows(x: Tensor, rows: Tensor) -> Tensor:
    return x.gather(1, rows.unsqueeze(-1).expand(-1, -1, x.shape[2]))


def _given_rows(x: Tensor, rows: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask.unsqueeze(-1), rows.to(x.dtype), x)


# table [M, ...], positions [B,T] (-1 at padding reads row 0) -> [B,T,...]
lookup = Op(
    "lookup",
    "(Tensor table, Tensor positions) -> Tensor",
    reference=_lookup,
    shape=lambda table, positions: table.new_empty((*positions.shape, *table.shape[1:])),
)

# x [B,T,E], rows [B,N] -> [B,N,E]
take_rows = Op(
    "take_rows",
    "(Tensor x, Tensor rows) -> Tensor",
    reference=_take_rows,
    shape=lambda x, rows: x.new_empty((x.shape[0], rows.shape[1], x.shape[2])),
)

# x [B,T,E], rows [B,T,E] or [1,1,E], mask [B,T] or [1,1] bools -> x, but for rows under the mask, [B,T,E]
given_rows = Op(
    "given_rows",
    "(Tensor x, Tensor rows, Tensor mask) -> Tensor",
    reference=_given_rows,
    shape=lambda x, rows, mask: torch.empty_like(x),
)
