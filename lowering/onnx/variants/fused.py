"""Attention as one node of ai.onnx, with the mask that the positions make added to its scores."""

from __future__ import annotations

from typing import Any

from accel.ir.ops import attention
from accel.lowering import Table
from accel.lowering.onnx.accel_ops import position_mask
from accel.lowering.onnx.builder import Builder

lower = Table("fused")


@lower(attention.attention.default)
def attend(
    b: Builder,
    q: str,
    k: str,
    v: str,
    q_pos: str,
    k_pos: str,
    bias: str | None,
    scale: float,
    softcap: float,
    mask: str,
    window: int,
    sink: str | None = None,
    *more: str | None,
    **options: str | None,
) -> Any:
    """A sink has no place in the node, and a soft cap would come after the mask, not before it; slots
    of each head's own have no mask there, and trees are left to the portable one.
    """
    if sink is not None or softcap or any(more) or options:
        return NotImplemented
    hidden = position_mask(b, q_pos, k_pos, bias, mask, window)  # [B,1 or H,T,C]
    if mask == "full" and bias is None:  # which is [B,1,1,C]
        hidden = b.node("Expand", hidden, b.concat_ints([1, 1, b.size(q_pos, 1), 1]))
    return b.node("Attention", q, k, v, hidden, scale=scale)
