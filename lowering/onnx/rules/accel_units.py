"""Choosing tokens by their units in ONNX."""

from __future__ import annotations

import math
from typing import Any

import torch

from accel.ir.ops import units
from accel.lowering.onnx.writer.builder import DTYPES, Builder
from accel.lowering.onnx.writer.table import lower


@lower(units.best_tokens.default)
def best_tokens(b: Builder, worth: str, label: str, seen: str, count: int) -> Any:
    """TopK keeps the first of equals. A list of more tokens than there are slots is filled with -1."""
    zero, one = (b.constant(n, torch.int64) for n in (0, 1))
    number, slots = b.size(worth, 3), b.size(label, 2)
    highest = b.constant(math.inf, torch.float32)
    worth = b.node("Where", b.node("IsNaN", worth), highest, worth)
    _, order = b.node("TopK", worth, b.node("Reshape", number, b.ints(1)), outputs=2)
    shape = b.node("Shape", order)
    numbers = b.node("Expand", b.node("Range", zero, number, one), shape)
    rank = b.node("ScatterElements", order, order, numbers, axis=3)
    label = b.node("Min", b.node("Max", label, zero), b.node("Sub", number, one))
    label = b.node("Unsqueeze", label, b.ints(2))
    label = b.node("Expand", label, b.concat_ints([1, 1, b.size(worth, 2), 1]))  # [B,G,T,C]
    rank = b.node("GatherElements", rank, label, axis=3)
    key = b.node("Add", b.node("Mul", rank, slots), b.node("Range", zero, slots, one))
    far = b.node("Mul", number, slots)
    key = b.node("Where", seen, key, far)
    most = b.constant(count, torch.int64)
    some = b.node("Reshape", b.node("Min", most, slots), b.ints(1))
    best, listed = b.node("TopK", key, some, axis=3, largest=0, outputs=2)
    none = b.constant(-1, torch.int64)
    listed = b.node("Where", b.node("Equal", best, far), none, listed)
    short = b.node("Reshape", b.node("Max", b.node("Sub", most, slots), zero), b.ints(1))
    pads = b.node("Concat", b.ints(0, 0, 0, 0, 0, 0, 0), short, axis=0)
    return b.node("Pad", listed, pads, none)


@lower(units.units_seen.default)
def units_seen(b: Builder, label: str, seen: str, count: Any) -> Any:
    zero, one = (b.constant(n, torch.int64) for n in (0, 1))
    groups, tokens, number = int(b.shape(label)[1]), b.size(seen, 2), b.operand(count, torch.int64)
    label = b.node("Min", b.node("Max", label, zero), b.node("Sub", number, one))
    label = b.node(
        "Expand", b.node("Unsqueeze", label, b.ints(2)), b.concat_ints([1, 1, tokens, 1])
    )
    real = b.node("Cast", seen, to=DTYPES[torch.float32])
    real = b.node("Expand", real, b.ints(1, groups, 1, 1))
    shape = b.concat_ints([b.size(seen, 0), groups, tokens, number])
    none = b.constant(0.0, torch.float32)
    blank = b.node("Expand", none, shape)
    found = b.node("ScatterElements", blank, label, real, axis=3, reduction="add")
    return b.node("Greater", found, none)
