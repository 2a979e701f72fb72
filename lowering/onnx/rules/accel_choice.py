"""Choosing pages of the cache in ONNX."""

from __future__ import annotations

import math
from typing import Any

import torch

from accel.ir.ops import choice
from accel.lowering.onnx.rules.accel_ops import kv_append, visible
from accel.lowering.onnx.rules.accel_pages import kv_pages
from accel.lowering.onnx.rules.aten_nn import product
from accel.lowering.onnx.writer.builder import Builder
from accel.lowering.onnx.writer.table import lower


@lower(choice.page_range.default)
def page_range(
    b: Builder, high: str, low: str, keys: str, q_pos: str, slots: str, page: int
) -> tuple[str, str]:
    first, count = _written(b, keys, q_pos, slots, page)
    read = kv_pages(b, keys, first, count, page)
    zero, one = (b.constant(n, torch.int64) for n in (0, 1))
    numbers = b.node(
        "Add", b.node("Unsqueeze", first, b.ints(1)), b.node("Range", zero, count, one)
    )
    ends = b.node("Mul", b.node("Add", numbers, one), b.constant(page, torch.int64))
    ahead = b.node("Sub", ends, b.node("Unsqueeze", slots, b.ints(1)))  # [B,count]
    filled = b.node(
        "And", b.node("Greater", ahead, zero), b.node("LessOrEqual", ahead, b.size(q_pos, 1))
    )
    filled = b.node("Unsqueeze", filled, b.ints(1, 3))

    def stored(buffer: str, op: str) -> str:
        before = b.node("Squeeze", kv_pages(b, buffer, first, count, 1), b.ints(3))
        new = b.node("Where", filled, b.node(op, read, b.ints(3), keepdims=0), before)
        return str(kv_append(b, buffer, new, first))

    return stored(high, "ReduceMax"), stored(low, "ReduceMin")


def _written(b: Builder, keys: str, q_pos: str, slots: str, page: int) -> tuple[str, str]:
    """As `ir.ops.pages.pages_written`."""
    wide, one = b.constant(page, torch.int64), b.constant(1, torch.int64)
    total = b.node("Add", b.node("Div", b.node("Sub", b.size(keys, 2), one), wide), one)
    count = b.node("Add", b.size(q_pos, 1), b.constant(page - 2, torch.int64))
    count = b.node("Min", b.node("Add", b.node("Div", count, wide), one), total)
    first = b.node("Min", b.node("Div", slots, wide), b.node("Sub", total, count))
    return str(first), str(count)


@lower(choice.page_bounds.default)
def page_bounds(b: Builder, q: str, high: str, low: str) -> Any:
    zero = b.constant(0.0, torch.float32)
    parts = (("Max", high), ("Min", low))
    return b.node(
        "Add", *(product(b, b.node(op, q, zero), part, torch.float32) for op, part in parts)
    )


@lower(choice.best_pages.default)
def best_pages(
    b: Builder,
    worth: str,
    q_pos: str,
    k_pos: str,
    slots: str,
    count: int,
    page: int,
    mask: str,
    window: int,
) -> Any:
    """TopK keeps the first of equals."""
    lowest, highest = (b.constant(x, torch.float32) for x in (-math.inf, math.inf))
    groups, one, wide = (
        int(b.shape(worth)[1]),
        b.constant(1, torch.int64),
        b.constant(page, torch.int64),
    )
    ahead = b.node("Range", b.constant(0, torch.int64), b.size(q_pos, 1), one)
    own_page = b.node("Div", b.node("Add", b.node("Unsqueeze", slots, b.ints(1)), ahead), wide)
    own_page = b.node("Unsqueeze", own_page, b.ints(1, 3))  # [B,1,T,1]
    last = b.node("Sub", b.size(k_pos, 1), one)
    total = b.node("Add", b.node("Div", last, wide), one)
    numbers = b.node("Range", b.constant(0, torch.int64), total, one)
    ends = b.node("Add", b.node("Mul", numbers, wide), b.constant(page - 1, torch.int64))
    newest = b.node("Gather", k_pos, b.node("Min", ends, last), axis=1)
    newest = b.node("Unsqueeze", newest, b.ints(1, 2))  # [B,1,1,N]
    seen = visible(b, b.node("Unsqueeze", q_pos, b.ints(1, 3)), newest, mask, window)
    seen = str(b.node("And", seen, b.node("Less", numbers, own_page)))
    worth = b.node("Where", b.node("IsNaN", worth), highest, worth)
    worth = b.node("Where", seen, worth, lowest)
    some = b.node("Reshape", b.node("Min", total, b.constant(count - 1, torch.int64)), b.ints(1))
    best, listed = b.node("TopK", worth, some, outputs=2)
    listed = b.node("Where", b.node("Equal", best, lowest), b.constant(-1, torch.int64), listed)
    return b.node("Concat", b.node("Expand", own_page, b.ints(1, groups, 1, 1)), listed, axis=3)


@lower(choice.key_products.default)
def key_products(
    b: Builder,
    q: str,
    keys: str,
    at: str | None = None,
    cos: str | None = None,
    sin: str | None = None,
    interleaved: bool = False,
) -> Any:
    """Keys are turned by hand: RotaryEmbedding takes no more slots than tables have rows."""
    if at is not None and cos is not None and sin is not None:
        keys = _turned(b, keys, at, cos, sin, interleaved)
    return product(b, q, keys, torch.float32, rank=4)


def _turned(b: Builder, keys: str, at: str, cos: str, sin: str, interleaved: bool) -> str:
    half, wide = int(b.shape(cos)[1]), int(b.shape(keys)[3])
    rows = b.node("Max", at, b.constant(0, torch.int64))
    axes = b.ints(1, 4) if interleaved else b.ints(1)
    c, s = (b.node("Unsqueeze", b.node("Gather", t, rows, axis=0), axes) for t in (cos, sin))
    turned, rest = keys, []
    if wide > 2 * half:
        sizes = b.ints(2 * half, wide - 2 * half)
        turned, last = b.node("Split", keys, sizes, axis=3, outputs=2)
        rest = [last]
    if interleaved:
        turned = b.node("Reshape", turned, b.ints(0, 0, 0, half, 2))
    first, second = b.node(
        "Split", turned, b.ints(*((1, 1) if interleaved else (half, half))), axis=-1, outputs=2
    )
    both = (
        b.node("Sub", b.node("Mul", first, c), b.node("Mul", second, s)),
        b.node("Add", b.node("Mul", second, c), b.node("Mul", first, s)),
    )
    found = b.node("Concat", *both, axis=-1)
    if interleaved:
        found = b.node("Reshape", found, b.ints(0, 0, 0, 2 * half))
    return str(b.node("Concat", found, *rest, axis=3) if rest else found)


@lower(choice.head_votes.default)
def head_votes(b: Builder, scores: str, seen: str, steps: float) -> Any:
    wide = b.constant(steps, torch.float32)
    scores = b.node("Div", b.node("Round", b.node("Mul", scores, wide)), wide)
    lowest = b.constant(torch.finfo(torch.float32).min / 2, torch.float32)
    shares = b.node("LogSoftmax", b.node("Where", seen, scores, lowest), axis=-1)
    heads = b.ints(1)
    top = b.node("ReduceMax", shares, heads)
    total = b.node("ReduceSum", b.node("Exp", b.node("Sub", shares, top)), heads)
    votes = b.node("Add", top, b.node("Log", total))
    return b.node("Where", seen, votes, b.constant(-math.inf, torch.float32))
