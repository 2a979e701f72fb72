"""What lies beside blocks of codes, and rows of which few numbers are there, in ONNX."""

from __future__ import annotations

import torch

from accel.ir.ops import patched
from accel.lowering.onnx.writer.builder import DTYPES, Builder
from accel.lowering.onnx.writer.table import lower

_FLOAT, _INT = DTYPES[torch.float32], DTYPES[torch.int64]


def _whole(b: Builder, blocks: str, width: int) -> str:
    """[B,G,P,R,D] -> [B,G,P R,D]."""
    return str(b.node("Reshape", blocks, b.ints(0, 0, -1, width)))


@lower(patched.add_product.default)
def add_product(b: Builder, x: str, a: str, right: str, rows: int) -> str:
    width = int(b.shape(x)[-1])
    rank = int(b.shape(a)[-1]) // rows
    sizes = (b.ints(0, 0, 0, rows, rank), b.ints(0, 0, 0, width, rank))
    left, other = (
        b.node("Reshape", b.node("Cast", part, to=_FLOAT), size)
        for part, size in zip((a, right), sizes, strict=True)
    )
    product = b.node("MatMul", left, b.node("Transpose", other, perm=[0, 1, 2, 4, 3]))
    return str(b.node("Add", x, _whole(b, product, width)))


@lower(patched.put_numbers.default)
def put_numbers(b: Builder, x: str, value: str, place: str, rows: int, along: str) -> str:
    width, turned = int(b.shape(x)[-1]), [0, 1, 2, 4, 3]
    lines = b.node("Reshape", x, b.ints(0, 0, -1, rows, width))
    lines = b.node("Transpose", lines, perm=turned) if along == "rows" else lines
    count = width if along == "rows" else rows
    each = int(b.shape(value)[-1]) // count
    values, places = (
        b.node("Reshape", b.node("Cast", part, to=kind), b.ints(0, 0, 0, count, each))
        for part, kind in ((value, _FLOAT), (place, _INT))
    )
    put = b.node("ScatterElements", lines, places, values, axis=4)
    return _whole(b, b.node("Transpose", put, perm=turned) if along == "rows" else put, width)


@lower(patched.spread_rows.default)
def spread_rows(b: Builder, value: str, mask: str, rows: int, width: int) -> str:
    wide, stay = -(-width // 8), int(b.shape(value)[-1]) // rows
    shifts = b.constant([[i] for i in range(8)], "uint8")
    bits = b.node("Reshape", mask, b.ints(0, 0, 0, rows, 1, wide))
    bits = b.node("BitShift", bits, shifts, direction="RIGHT")
    bits = b.node("BitwiseAnd", bits, b.constant(1, torch.uint8))
    bits = b.node("Reshape", b.node("Cast", bits, to=_INT), b.ints(0, 0, 0, rows, 8 * wide))
    if 8 * wide > width:
        bits = b.node("Slice", bits, b.ints(0), b.ints(width), b.ints(-1))
    one, zero = (b.constant(n, torch.int64) for n in (1, 0))
    place = b.node("Sub", b.node("CumSum", bits, b.constant(4, torch.int64)), one)
    values = b.node("Reshape", b.node("Cast", value, to=_FLOAT), b.ints(0, 0, 0, rows, stay))
    found = b.node("GatherElements", values, b.node("Max", place, zero), axis=4)
    found = b.node("Where", b.node("Greater", bits, zero), found, b.constant(0.0, torch.float32))
    return _whole(b, found, width)
