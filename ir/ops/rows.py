"""Choosing tokens: position tables, and the rows that get logits."""

from __future__ import annotations

from torch import Tensor

from accel.ir.ops.op import Op


def _lookup(table: Tensor, positions: Tensor) -> Tensor:
    return table[positions.clamp(min=0)]


def _take_rows(x: Tensor, rows: Tensor) -> Tensor:
    return x.gather(1, rows.unsqueeze(-1).expand(-1, -1, x.shape[2]))


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
