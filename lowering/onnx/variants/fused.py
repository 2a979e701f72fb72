"""Attention as one node of ai.onnx, with the mask that the positions make added to its scores."""

from __future__ import annotations

from typing import Any

from accel.ir.ops import attention
from accel.lowering import Table
from accel.lowering.onnx.rules.accel_ops import position_mask
from accel.lowering.onnx.writer.builder import Builder

lower = Table("fused")


@lower(attention.attention.default)
def attend(b: Builder, *operands: Any, **more: Any) -> Any:
    """A sink has no place in the node, and a soft cap would come after the mask, not before it; slots
    of each head's own have no mask there, and trees, pages and what is beside are left to the portable one.
    """
    x = attention.Operands[str](*operands, **more)
    if (
        x.sink is not None
        or x.softcap
        or x.kept_k is not None
        or x.tree is not None
        or x.pages is not None
        or x.beside is not None
    ):
        return NotImplemented
    hidden = position_mask(b, x)  # [B,1 or H,T,C]
    if x.mask == "full" and x.bias is None:  # which is [B,1,1,C]
        hidden = b.node("Expand", hidden, b.concat_ints([1, 1, b.size(x.q_pos, 1), 1]))
    return b.node("Attention", x.q, x.k, x.v, hidden, scale=x.scale)
