"""Choosing tokens by their units in ONNX."""

from __future__ import annotations

import math
from typing import Any

import torch

from accel.ir.ops import units
from accel.lowering.onnx.writer.builder import Builder
from accel.lowering.onnx.writer.table import lower


@lower(units.best_tokens.default)
def best_tokens(b: Builder, worth: str, label: str, seen: str, count: int) -> Any:
    """TopK keeps the first of equals. Where it runs, there are more slots than are read."""
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
    best, listed = b.node("TopK", key, b.ints(count), axis=3, largest=0, outputs=2)
    return b.node("Where", b.node("Equal", best, far), b.constant(-1, torch.int64), listed)
