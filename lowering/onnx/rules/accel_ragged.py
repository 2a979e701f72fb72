"""Kept slots of unequal numbers in ONNX (`ir.ops.ragged`): copied, at each call, to as many of each head."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from accel.ir.ops import attention
from accel.lowering.onnx.writer.builder import Builder

Operands = attention.Operands[str]
_LAST = (1 << 63) - 1  # where a slice ends: behind everything


@dataclass(frozen=True)
class _Lists:
    """counts, starts [B,G,1]; slots [M]: 0..M-1; width []: P."""

    counts: str
    starts: str
    slots: str
    width: str


def _lists(b: Builder, x: Operands) -> _Lists:
    zero, one = b.constant(0, torch.int64), b.constant(1, torch.int64)
    counts = b.node("Unsqueeze", x.kept_counts, b.ints(2))
    starts = b.node("Sub", b.node("CumSum", counts, one), counts)
    room = b.node("Squeeze", b.size(str(x.kept_pos), 2))
    most = b.node("Max", b.node("ReduceMax", x.kept_counts, keepdims=0), one)
    slots = b.node("Range", zero, room, one)
    return _Lists(counts, starts, slots, b.node("Min", most, room))


def padded(b: Builder, x: Operands) -> Operands:
    """Attention over as many kept slots of each head, [B,G,P,…]: P of the head that has most."""
    if x.kept_counts is None or x.kept_pos is None:
        return x
    zero, one = b.constant(0, torch.int64), b.constant(1, torch.int64)
    lists = _lists(b, x)
    ranks = b.node("Range", zero, lists.width, one)
    real = b.node("Less", ranks, lists.counts)  # [B,G,P]
    at = b.node("Where", real, b.node("Add", lists.starts, ranks), zero)
    at = b.node("Unsqueeze", at, b.ints(3))

    def spread(flat: str) -> str:
        return str(b.node("GatherND", b.node("Squeeze", flat, b.ints(1)), at, batch_dims=1))

    where = str(b.node("Where", real, spread(x.kept_pos), b.constant(-1, torch.int64)))
    groups = int(b.shape(x.kept_counts)[1])
    b.meta[where] = torch.empty(1, groups, 1, dtype=torch.int64, device="meta")
    k = spread(str(x.kept_k))
    v = k if x.kept_v == x.kept_k else spread(str(x.kept_v))
    return replace(x, kept_k=k, kept_v=v, kept_pos=where, kept_counts=None)


def in_slots(b: Builder, x: Operands, probs: str) -> str:
    """Weights [B,G,N,P+S] of the kept slots of each head -> of all heads' [B,G,N,M+S], 0 for those of others."""
    if x.kept_counts is None:
        return probs
    zero, lists = b.constant(0, torch.int64), _lists(b, x)
    at = b.node("Sub", lists.slots, lists.starts)  # [B,G,M]
    mine = b.node(
        "And", b.node("GreaterOrEqual", at, zero), b.node("Less", at, lists.counts)
    )  # [B,G,M]
    width = b.node("Unsqueeze", lists.width, b.ints(0))
    old = b.node("Slice", probs, b.ints(0), width, b.ints(3))
    new = b.node("Slice", probs, width, b.ints(_LAST), b.ints(3))
    rows = b.node("Shape", probs, start=2, end=3)
    shape = b.node("Concat", b.ints(1, 1), rows, b.ints(1), axis=0)
    at = b.node("Unsqueeze", b.node("Where", mine, at, zero), b.ints(2))
    found = b.node("GatherElements", old, b.node("Expand", at, shape), axis=3)
    found = b.node(
        "Where", b.node("Unsqueeze", mine, b.ints(2)), found, b.constant(0.0, torch.float32)
    )
    return str(b.node("Concat", found, new, axis=3))
