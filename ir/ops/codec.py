"""Keys and values in few bits."""

from __future__ import annotations

import torch
from torch import Tensor

from accel.ir.ops.op import Op

LEVELS = 127  # of int8, to either side of 0
_LEAST = 1e-30  # the largest number of a row at least, so that a row of zeros has a step too


def _encode_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    # x * 0 is 0 for all but what is no finite number: a row that holds one has the scale NaN
    scale = x.abs().amax(-1).clamp(min=_LEAST) / LEVELS + (x * 0).sum(-1)
    steps = (x / scale.unsqueeze(-1)).round()
    return torch.where(steps.isnan(), 0, steps).to(torch.int8), scale


# x [..,D] -> q int8 [..,D], scale [..]: each row in 255 steps of its own, from its largest number down
# to the negative of that. A row that holds NaN or an infinity is NaN when it is read back.
encode_rows = Op(
    "encode_rows",
    "(Tensor x) -> (Tensor, Tensor)",
    reference=_encode_rows,
    shape=lambda x: (x.new_empty(x.shape, dtype=torch.int8), x.new_empty(x.shape[:-1])),
)

# q int8 [..,D], scale [..] -> [..,D]
decode_rows = Op(
    "decode_rows",
    "(Tensor q, Tensor scale) -> Tensor",
    reference=lambda q, scale: q * scale.unsqueeze(-1),
    shape=lambda q, scale: scale.new_empty(q.shape),
)


def _look_up_rows(q: Tensor, table: Tensor, scale: Tensor | None = None) -> Tensor:
    numbers = table[q.int()]
    return numbers if scale is None else numbers * scale.unsqueeze(-1)


# q uint8 [..,D], places in a table [n] of no more than 256 numbers; scale [..] or none -> [..,D]
look_up_rows = Op(
    "look_up_rows",
    "(Tensor q, Tensor table, Tensor? scale=None) -> Tensor",
    reference=_look_up_rows,
    shape=lambda q, table, scale=None: table.new_empty(q.shape),
)
