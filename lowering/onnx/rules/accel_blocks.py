"""Slots that lie in blocks of a pool, in ONNX: the blocks are gathered."""

from __future__ import annotations

import torch

from accel.ir.ops import kv
from accel.lowering.onnx.writer.builder import Builder
from accel.lowering.onnx.writer.table import lower


@lower(kv.gather_blocks.default)
def gather_blocks(b: Builder, pool: str, table: str) -> str:
    known = b.node("Max", table, b.constant(0, torch.int64))
    found = b.node("Gather", pool, known, axis=0)  # [B,M,G,E,..]
    groups, block, *rest = (int(n) for n in b.shape(pool)[1:])
    turned = b.node("Transpose", found, perm=[0, 2, 1, *range(3, 4 + len(rest))])
    shape = b.concat_ints([b.size(table, 0), groups, _slots(b, table, block), *rest])
    return str(b.node("Reshape", turned, shape, allowzero=1))


@lower(kv.block_positions.default)
def block_positions(b: Builder, table: str, heads: int, block: int) -> str:
    zero = b.constant(0, torch.int64)
    blocks = b.node("Range", zero, b.size(table, 1), b.constant(1, torch.int64))
    first = b.node("Mul", blocks, b.constant(block, torch.int64))
    slots = b.node("Add", b.node("Unsqueeze", first, b.ints(1)), b.constant(torch.arange(block)))
    none = b.node("Unsqueeze", b.node("Less", table, zero), b.ints(2))  # [B,M,1]
    where = b.node("Where", none, b.constant(-1, torch.int64), slots)
    shape = b.concat_ints([b.size(table, 0), 1, _slots(b, table, block)])
    alike = b.node("Reshape", where, shape, allowzero=1)
    b.meta[alike] = torch.empty(1, 1, 1, dtype=torch.int64, device="meta")
    return str(b.node("Expand", alike, b.ints(1, heads, 1)))  # last, for who needs one head's


def _slots(b: Builder, table: str, block: int) -> str:
    """How many slots the blocks of a row are, of rank 0."""
    count = str(b.node("Mul", b.size(table, 1), b.constant(block, torch.int64)))
    b.meta[count] = torch.zeros((), dtype=torch.int64)
    return count
