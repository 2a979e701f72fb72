"""Keys and values in few bits, in ONNX."""

from __future__ import annotations

import torch

from accel.ir.ops import codec
from accel.lowering.onnx.writer.builder import DTYPES, Builder
from accel.lowering.onnx.writer.table import lower


@lower(codec.encode_rows.default)
def encode_rows(b: Builder, x: str) -> tuple[str, str]:
    last = b.ints(-1)
    largest = b.node("ReduceMax", b.node("Abs", x), last, keepdims=1)
    least = b.constant(1e-30, torch.float32)
    step = b.node("Div", b.node("Max", largest, least), b.constant(127.0, torch.float32))
    # onnxruntime's largest of NaN and others may be either
    broken = b.node("ReduceSum", b.node("Mul", x, b.constant(0.0, torch.float32)), last, keepdims=1)
    step = b.node("Add", step, broken)
    steps = b.node("Round", b.node("Div", x, step))
    known = b.node("Where", b.node("IsNaN", steps), b.constant(0.0, torch.float32), steps)
    codes = b.node("Cast", known, to=DTYPES[torch.int8])
    return str(codes), str(b.node("Squeeze", step, last))


@lower(codec.decode_rows.default)
def decode_rows(b: Builder, q: str, scale: str) -> str:
    numbers = b.node("Cast", q, to=DTYPES[torch.float32])
    return str(b.node("Mul", numbers, b.node("Unsqueeze", scale, b.ints(-1))))


@lower(codec.encode_halves.default)
def encode_halves(b: Builder, x: str) -> str:
    ends = (b.constant(end, torch.float32) for end in (-codec.MOST_HALF, codec.MOST_HALF))
    broken = b.node("Mul", x, b.constant(0.0, torch.float32))
    return str(
        b.node("Cast", b.node("Add", b.node("Clip", x, *ends), broken), to=DTYPES[torch.float16])
    )


@lower(codec.decode_halves.default)
def decode_halves(b: Builder, q: str) -> str:
    return str(b.node("Cast", q, to=DTYPES[torch.float32]))


@lower(codec.look_up_rows.default)
def look_up_rows(b: Builder, q: str, table: str, scale: str | None = None) -> str:
    numbers = b.node("Gather", table, b.node("Cast", q, to=DTYPES[torch.int32]), axis=0)
    return str(
        numbers if scale is None else b.node("Mul", numbers, b.node("Unsqueeze", scale, b.ints(-1)))
    )


@lower(codec.encode_static.default)
def encode_static(b: Builder, x: str, scale: str, bits: int) -> str:
    least, most = (b.constant(float(end), torch.float32) for end in codec.ends(bits))
    parts = b.node("Div", b.constant(1.0, torch.float32), scale)
    steps = b.node("Round", b.node("Mul", x, b.node("Unsqueeze", parts, b.ints(1))))
    steps = b.node("Where", b.node("IsNaN", steps), most, steps)
    codes = b.node("Clip", steps, least, most)
    if bits == 8:
        return str(b.node("Cast", codes, to=DTYPES[torch.int8]))
    width, lead = int(b.shape(x)[-1]), [0] * (b.rank(x) - 1)
    codes = b.node("Sub", codes, least)
    if width % 2:
        codes = b.node("Pad", codes, b.ints(0, 1), None, b.ints(-1))
    pairs = b.node("Reshape", codes, b.ints(*lead, (width + 1) // 2, 2))
    placed = b.node("Mul", pairs, b.constant([1.0, 16.0], torch.float32))
    total = b.node("ReduceSum", placed, b.ints(-1), keepdims=0)
    return str(b.node("Cast", total, to=DTYPES[torch.uint8]))


@lower(codec.decode_static.default)
def decode_static(b: Builder, q: str, scale: str, bits: int, width: int) -> str:
    steps = b.node("Unsqueeze", scale, b.ints(1))
    if bits == 8:
        return str(b.node("Mul", b.node("Cast", q, to=DTYPES[torch.float32]), steps))
    lead = [0] * (b.rank(q) - 1)
    low = b.node("BitwiseAnd", q, b.constant(15, torch.uint8))
    high = b.node("BitShift", q, b.constant(4, torch.uint8), direction="RIGHT")
    # a shift by [0,4] of each byte would take five times as long: onnxruntime goes by the last axis
    pairs = b.node("Concat", *(b.node("Unsqueeze", x, b.ints(-1)) for x in (low, high)), axis=-1)
    codes = b.node("Reshape", pairs, b.ints(*lead, 2 * -(-width // 2)))
    if width % 2:
        codes = b.node("Slice", codes, b.ints(0), b.ints(width), b.ints(-1))
    numbers = b.node("Cast", codes, to=DTYPES[torch.float32])
    least = b.constant(float(codec.ends(4)[0]), torch.float32)
    return str(b.node("Mul", b.node("Add", numbers, least), steps))
