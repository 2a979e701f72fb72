"""Calls without padding in ONNX (`ir.ops.flat`): tokens go into slots by themselves, and are padded for attention."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from accel.ir.ops import flat
from accel.lowering.onnx.rules.accel_ops import attend
from accel.lowering.onnx.writer.builder import Builder
from accel.lowering.onnx.writer.table import lower


@lower(flat.flat_append.default)
def flat_append(b: Builder, buffer: str, new: str, slots: str, owner: str) -> str:
    row, number = (b.node("Gather", owner, b.constant(i, torch.int64), axis=1) for i in (0, 1))
    slot = b.node("Add", b.node("Gather", slots, row, axis=0), number)  # [F]
    if b.rank(buffer) == 2:
        places = [b.node("Unsqueeze", value, b.ints(0, 2)) for value in (row, slot)]
        return str(b.node("ScatterND", buffer, b.node("Concat", *places, axis=2), new))
    groups = int(b.shape(buffer)[1])
    shape = b.concat_ints([1, groups, b.size(owner, 0), 1])
    heads = b.constant(torch.arange(groups).reshape(1, groups, 1, 1))
    row, slot = (b.node("Unsqueeze", value, b.ints(0, 1, 3)) for value in (row, slot))
    places = [b.node("Expand", value, shape) for value in (row, heads, slot)]
    return str(b.node("ScatterND", buffer, b.node("Concat", *places, axis=3), new))


@lower(flat.flat_attention.default)
def flat_attention(b: Builder, *operands: Any, **more: Any) -> str:
    """Of rows that are padded to the longest of the call."""
    x = flat.Flat[str](*operands, **more)
    zero, one = b.constant(0, torch.int64), b.constant(1, torch.int64)
    last = b.node("ReduceMax", b.node("Gather", x.owner, one, axis=1), keepdims=0)
    width = b.node("Reshape", b.node("Add", last, one), b.ints(1))
    shape = b.node("Concat", b.vector(b.size(x.k, 0)), width, axis=0)  # [B,W]
    numbers = b.node("Range", zero, b.node("Squeeze", b.size(str(x.owner), 0)), one)
    none = b.node("Expand", zero, shape)
    lanes = b.node(
        "ScatterND", none, x.owner, numbers
    )  # which token is where; the first in padding
    hidden = b.node("Expand", b.constant(-1, torch.int64), shape)
    q_pos = b.node("ScatterND", hidden, x.owner, b.node("Squeeze", x.q_pos, b.ints(0)))
    q = b.node("Gather", b.node("Squeeze", x.q, b.ints(0)), lanes, axis=1)  # [H,B,W,D]
    q = str(b.node("Transpose", q, perm=[1, 0, 2, 3]))
    heads, size = int(b.shape(x.q)[1]), int(b.shape(x.q)[3])
    b.meta[q] = torch.empty(1, heads, 1, size, device="meta")
    b.meta[str(q_pos)] = torch.empty(1, 1, dtype=torch.int64, device="meta")
    out = attend(b, **flat.attends(replace(x, q=q, q_pos=str(q_pos))))
    by_token = b.node("Transpose", out, perm=[0, 2, 1, 3])
    found = b.node("Transpose", b.node("GatherND", by_token, x.owner), perm=[1, 0, 2])
    return str(b.node("Unsqueeze", found, b.ints(0)))
