"""Weights of few bits: com.microsoft's MatMulNBits and GatherBlockQuantized over the same bytes.

Always accuracy level 4 (8-bit activations): at any other level 2 and 8 bits fall to a path that is
some hundred times slower, and 4 bits lose their speed beyond one row.

Codes in planes become such of 4 bits; those of an embedding are taken apart in the rows that are read.
"""

from __future__ import annotations

import torch

from accel.ir.errors import LoweringError
from accel.ir.ops import quantized
from accel.lowering.onnx.writer.builder import DTYPES, MICROSOFT, Builder, Param
from accel.lowering.onnx.writer.table import lower


@lower(quantized.quantized_linear.default)
def quantized_linear(
    b: Builder,
    x: str,
    q: str,
    scales: str,
    zeros: str | None,
    bias: str | None,
    bits: int,
    block: int,
) -> str:
    if quantized.in_planes(bits):
        return _planes_product(b, x, q, _wide(b, scales), zeros, bias, bits, block)
    return _product(b, x, q, _wide(b, scales), zeros, bias, bits, block, int(b.shape(q)[0]))


def _product(
    b: Builder,
    x: str,
    q: str,
    scales: str,
    zeros: str | None,
    bias: str | None,
    bits: int,
    block: int,
    rows: int,
) -> str:
    sizes = {"K": int(b.shape(x)[-1]), "N": rows, "bits": bits, "block_size": block}
    operands = (x, q, scales, zeros, None, bias)
    return str(b.node("MatMulNBits", *operands, domain=MICROSOFT, accuracy_level=4, **sizes))


def _planes_product(
    b: Builder,
    x: str,
    q: str,
    scales: str,
    zeros: str | None,
    bias: str | None,
    bits: int,
    block: int,
) -> str:
    """Of codes in planes: products over codes of 4 bits, which onnxruntime makes once, when it opens the graph. What
    is above the lowest four is a product of its own, with sixteen times the scales.
    """
    if zeros is not None and bits > 4:
        raise LoweringError(f"onnx: no product of {bits}-bit weights with zero points; use 4 bits")
    rows, blocks = int(b.shape(q)[0]), -(-int(b.shape(x)[-1]) // block)
    low, *_ = quantized.planes(bits)

    def product(codes: str, scales: str, zeros: str | None, bias: str | None) -> str:
        half = block // 2
        flat = b.node("Reshape", codes, b.ints(rows, -1))
        if blocks * block % quantized.GROUP:
            flat = b.node("Slice", flat, b.ints(0), b.ints(blocks * half), b.ints(1))
        q = b.node("Reshape", flat, b.ints(rows, blocks, half))
        return _product(b, x, q, scales, zeros, bias, 4, block, rows)

    middle = 2 ** (bits - 1)
    if bits < 4:
        return product(_nibbles(b, q, bits, 0 if zeros else 8 - middle), scales, zeros, bias)
    none = b.node("Expand", b.constant([[0]], "uint8"), b.ints(rows, -(-blocks // 2)))
    first = product(
        b.node("Slice", q, b.ints(0), b.ints(low[2].stop), b.ints(-1)), scales, none, bias
    )
    more = b.node("Mul", scales, b.constant(16.0, torch.float32))
    second = product(_nibbles(b, q, bits - 4, 8 - middle // 16, low[2].stop), more, None, None)
    return str(b.node("Add", first, second))


def _nibbles(b: Builder, q: str, bits: int, place: int, start: int = 0) -> str:
    """Codes of less than 4 bits, whose planes begin at a byte, as bytes of two with `place` added, by tables."""
    found: str | None = None
    for own, shift, where in quantized.planes(bits):
        each = torch.arange(256)[:, None] >> torch.arange(0, 8, own) & (2**own - 1)
        each = (each << shift) + (place if where.start == 0 else 0)
        table = b.constant(each[:, ::2] | each[:, 1::2] << 4, torch.uint8)
        plane = b.node(
            "Slice", q, b.ints(start + where.start), b.ints(start + where.stop), b.ints(-1)
        )
        codes = b.node("Gather", table, b.node("Cast", plane, to=DTYPES[torch.int32]), axis=0)
        codes = b.node("Reshape", codes, b.ints(0, 0, -1))
        found = codes if found is None else b.node("Add", found, codes)
    assert found is not None
    return found


@lower(quantized.quantized_embedding.default)
def quantized_embedding(
    b: Builder, ids: str, q: str, scales: str, zeros: str | None, bits: int, block: int, width: int
) -> str:
    """Scales that are no float32 are widened in the rows that are read, where there are no zero points: all would take
    more memory than the weight's share of a step.
    """
    if quantized.in_planes(bits):
        return _planes_read(b, ids, q, scales, zeros, bits, block, width)
    rows, blocks, size = b.shape(q)
    flat = b.viewed(q, (rows, blocks * size)) if isinstance(q, Param) else _flat(b, q)
    narrow = isinstance(scales, Param) and (b.parts(scales) or b.dtype(scales) != torch.float32)
    if isinstance(scales, Param) and narrow and zeros is None:
        flat, scales, ids = _rows_alone(b, ids, flat, scales)
    found = b.node(
        "GatherBlockQuantized", flat, ids, _wide(b, scales), zeros,
        domain=MICROSOFT, bits=bits, block_size=block, gather_axis=0, quantize_axis=1,
    )  # fmt: skip
    if width == blocks * block:
        return str(found)
    return str(b.node("Slice", found, b.ints(0), b.ints(width), b.ints(-1)))


def _planes_read(
    b: Builder, ids: str, q: str, scales: str, zeros: str | None, bits: int, block: int, width: int
) -> str:
    """The same where codes lie in planes."""
    each, blocks = b.node("Reshape", ids, b.ints(-1)), -(-width // block)
    _, groups, size = b.shape(q)
    flat = b.viewed(q, (int(b.shape(q)[0]), groups * size)) if isinstance(q, Param) else _flat(b, q)
    rows = b.node("Reshape", b.node("Gather", flat, each), b.ints(-1, groups, size))
    codes = _codes(b, rows, bits, blocks * block)
    steps = _scales_read(b, each, scales)
    if zeros is None:
        less = b.constant(float(2 ** (bits - 1)), torch.float32)
    else:
        points = _apart(b, b.node("Gather", zeros, each), quantized.zero_bits(bits), 1)
        points = b.node("Slice", points, b.ints(0), b.ints(blocks), b.ints(1))
        less = b.node("Unsqueeze", b.cast(points, torch.float32), b.ints(2))
    numbers = b.node("Reshape", b.cast(codes, torch.float32), b.ints(-1, blocks, block))
    scaled = b.node("Mul", b.node("Sub", numbers, less), b.node("Unsqueeze", steps, b.ints(2)))
    found = b.node("Reshape", scaled, b.ints(0, -1))
    if width < blocks * block:
        found = b.node("Slice", found, b.ints(0), b.ints(width), b.ints(-1))
    shape = b.node("Concat", b.node("Shape", ids), b.ints(width), axis=0)
    return str(b.node("Reshape", found, shape))


def _codes(b: Builder, q: str, bits: int, count: int) -> str:
    """Codes of rows [rows, groups, bytes] of planes, uint8 [rows, count]."""
    found: str | None = None
    for own, place, where in quantized.planes(bits):
        plane = b.node("Slice", q, b.ints(where.start), b.ints(where.stop), b.ints(-1))
        codes = _apart(b, plane, own, 2)
        if place:
            codes = b.node("BitShift", codes, b.constant(place, torch.uint8), direction="LEFT")
        found = codes if found is None else b.node("BitwiseOr", found, codes)
    flat = b.node("Reshape", found, b.ints(0, -1))
    return str(b.node("Slice", flat, b.ints(0), b.ints(count), b.ints(1)))


def _apart(b: Builder, packed: str, bits: int, lead: int) -> str:
    """Codes [..., n * 8 / bits] of bytes [..., n], behind so many axes."""
    shifts = b.constant([bits * i for i in range(8 // bits)], "uint8")
    parts = b.node("BitShift", b.node("Unsqueeze", packed, b.ints(-1)), shifts, direction="RIGHT")
    codes = b.node("BitwiseAnd", parts, b.constant(2**bits - 1, torch.uint8))
    return str(b.node("Reshape", codes, b.ints(*[0] * lead, -1)))


def _rows_alone(b: Builder, ids: str, flat: str, scales: Param) -> tuple[str, str, str]:
    """A weight's bytes and scales in the rows `ids`, and the places of these rows in them."""
    each = b.node("Reshape", ids, b.ints(-1))
    found = _scales_read(b, each, scales)
    count = b.node("Size", ids)
    places = b.node("Range", b.constant(0, torch.int64), count, b.constant(1, torch.int64))
    return b.node("Gather", flat, each), found, b.node("Reshape", places, b.node("Shape", ids))


def _scales_read(b: Builder, each: str, scales: str) -> str:
    """Those of the rows `each`, float32 [rows, blocks]."""
    own = b.parts(scales) if isinstance(scales, Param) else ()
    parts = [b.cast(b.node("Gather", part, each), torch.float32) for part in own or (scales,)]
    found = parts[0]
    if len(parts) > 1:
        few = b.shape(own[0])[1]
        fine = b.node("Reshape", parts[1], b.ints(0, few, -1))
        scaled = b.node("Mul", fine, b.node("Unsqueeze", found, b.ints(2)))
        found = b.node("Reshape", scaled, b.ints(0, -1))
    return str(found)


def _wide(b: Builder, scales: str) -> str:
    """In float32, which the operators take; onnxruntime widens them once, when it opens the graph."""
    return b.cast(scales, torch.float32)


def _flat(b: Builder, q: str) -> str:
    return str(b.node("Reshape", q, b.ints(0, -1)))
