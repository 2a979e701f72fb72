"""The tokens of all rows of a call in one row [1,F], without padding: each says whose it is.

owner [F,2]: the row of each token, and its number among that row's tokens of the call, from 0 on. Tokens of a row
follow each other, and rows come in order; a row may have none.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, TypeVar

import torch
from torch import Tensor

from accel.ir.ops.attention import Operands, attention
from accel.ir.ops.op import Op

T = TypeVar("T")


@dataclass(frozen=True)
class Flat(Operands[T]):
    """What `flat_attention` is given, in the order of its schema."""

    owner: T | None = None


def attends(x: Flat[T]) -> dict[str, Any]:
    """The operands of `attention` among them, by name."""
    return {f.name: getattr(x, f.name) for f in fields(Operands)}


def _flat_append(buffer: Tensor, new: Tensor, slots: Tensor, owner: Tensor) -> Tensor:
    row, number = owner.unbind(1)
    found, slot = buffer.clone(), slots[row] + number
    if buffer.dim() == 2:
        found[row, slot] = new[0]
    else:
        found[row, :, slot] = new[0].transpose(0, 1)
    return found


# buffer [B,G,C,..], new [1,G,F,..] (or buffer [B,C], new [1,F]), slots [B], owner [F,2]: a token goes into slot
# slots[row] + number of its row. A lowering may write in place: the old buffer is not read afterwards.
flat_append = Op(
    "flat_append",
    "(Tensor buffer, Tensor new, Tensor slots, Tensor owner) -> Tensor",
    reference=_flat_append,
    shape=lambda buffer, new, slots, owner: buffer.new_empty(buffer.shape),
)


def _flat_attention(*operands: Any, **more: Any) -> Tensor:
    x = Flat[Tensor](*operands, **more)
    assert x.owner is not None
    row, number = x.owner.unbind(1)
    width = int(number.max()) + 1 if number.numel() else 1
    q = x.q.new_zeros(x.k.shape[0], width, x.q.shape[1], x.q.shape[3])
    q[row, number] = x.q[0].transpose(0, 1)
    q_pos = torch.full(q.shape[:2], -1, dtype=x.q_pos.dtype, device=q.device)
    q_pos[row, number] = x.q_pos[0]
    out = attention.reference(**attends(x) | {"q": q.transpose(1, 2), "q_pos": q_pos})
    found: Tensor = out.transpose(1, 2)[row, number].transpose(0, 1).unsqueeze(0).contiguous()
    return found


# The operands of `attention`, of which q [1,H,F,D] and q_pos [1,F] are of the tokens, and all others of the rows; and
# owner [F,2]. Neither a tree, nor pages, nor what is beside. -> [1,H,F,Dv]
flat_attention = Op(
    "flat_attention",
    attention.schema.replace(") -> Tensor", ", Tensor? owner=None) -> Tensor"),
    reference=_flat_attention,
    shape=lambda q, k, v, *rest, **more: q.new_empty((*q.shape[:3], v.shape[3])),
)
