"""Blocks of rows in a few bits a number, in ONNX: bytes are taken apart by shifts."""

from __future__ import annotations

import torch

from accel.ir.ops import groups
from accel.lowering.onnx.writer.builder import DTYPES, Builder
from accel.lowering.onnx.writer.table import lower

_FLOAT, _HALF = DTYPES[torch.float32], DTYPES[torch.float16]


def _number(b: Builder, value: float) -> str:
    return b.constant(value, torch.float32)


def _last(b: Builder, x: str, end: int) -> str:
    """The first `end` along the last axis."""
    return str(b.node("Slice", x, b.ints(0), b.ints(end), b.ints(-1)))


@lower(groups.group_quantize.default)
def group_quantize(b: Builder, x: str, bits: int, group: int, along: str) -> tuple[str, str, str]:
    rank, (rows, width) = b.rank(x), map(int, b.shape(x)[-2:])
    lead, most, per = [0] * (rank - 2), 2**bits - 1, 8 // bits
    if along == "rows":
        axis, cut = rank - 1, b.node("Reshape", x, b.ints(*lead, rows // group, group, width))
    else:
        axis, short = rank, -width % group
        last = b.node("Slice", x, b.ints(-1), b.ints(width), b.ints(-1))
        wide = b.node("Concat", x, *[last] * short, axis=-1) if short else x
        cut = b.node("Reshape", wide, b.ints(*lead, rows, -(-width // group), group))
    axes = b.ints(axis)
    low, high = (
        b.node("ReduceMin", cut, axes, keepdims=1),
        b.node("ReduceMax", cut, axes, keepdims=1),
    )
    # onnxruntime's largest of NaN and others may be either
    broken = b.node("ReduceSum", b.node("Mul", cut, _number(b, 0.0)), axes, keepdims=1)
    half = b.node("Cast", b.node("Where", b.node("IsNaN", broken), _number(b, 0.0), low), to=_HALF)
    least = b.node("Cast", half, to=_FLOAT)
    even = b.node("Div", b.node("Sub", high, least), _number(b, most))
    step = b.node("Max", even, b.node("Mul", b.node("Sub", least, low), _number(b, 2.0)))
    step = b.node("Add", b.node("Mul", step, _number(b, groups.WIDER)), _number(b, groups.LEAST))
    scale = b.node("Cast", b.node("Add", step, broken), to=_HALF)
    steps = b.node("Div", b.node("Sub", cut, least), b.node("Cast", scale, to=_FLOAT))
    steps = b.node("Clip", b.node("Round", steps), _number(b, 0.0), _number(b, most))
    steps = b.node("Where", b.node("IsNaN", steps), _number(b, 0.0), steps)
    short = -width % per
    if short or (along == "channels" and width % group):
        steps = _last(b, b.node("Reshape", steps, b.ints(*lead, rows, -1)), width)
        steps = b.node("Pad", steps, b.ints(0, short), None, b.ints(-1)) if short else steps
    cut = b.node("Reshape", steps, b.ints(*lead, rows, per, -1))
    place = b.constant([[float(1 << bits * i)] for i in range(per)], "float32")
    total = b.node("ReduceSum", b.node("Mul", cut, place), b.ints(rank - 1), keepdims=0)
    codes = b.node("Reshape", b.node("Cast", total, to=DTYPES[torch.uint8]), b.ints(*lead, -1))
    return (
        str(codes),
        str(b.node("Reshape", scale, b.ints(*lead, -1))),
        str(b.node("Reshape", half, b.ints(*lead, -1))),
    )


def _apart(b: Builder, codes: str, bits: int, rows: int, width: int, short: int) -> str:
    """The codes of blocks, floats [..,R,width + short]."""
    per, lead = 8 // bits, [0] * (b.rank(codes) - 1)
    wide = -(-width // per)
    shifts = b.constant([[bits * i] for i in range(per)], "uint8")
    apart = b.node("Reshape", codes, b.ints(*lead, rows, 1, wide))
    if bits < 8:
        apart = b.node("BitShift", apart, shifts, direction="RIGHT")
        apart = b.node("BitwiseAnd", apart, b.constant(2**bits - 1, torch.uint8))
    steps = str(b.node("Cast", apart, to=_FLOAT))
    if wide * per > width or short:
        steps = _last(b, b.node("Reshape", steps, b.ints(*lead, rows, wide * per)), width)
        steps = b.node("Pad", steps, b.ints(0, short), None, b.ints(-1)) if short else steps
    return steps


@lower(groups.group_dequantize.default)
def group_dequantize(
    b: Builder,
    codes: str,
    scale: str,
    least: str,
    bits: int,
    group: int,
    along: str,
    rows: int,
    width: int,
    finer: str | None = None,
) -> str:
    lead, count = [0] * (b.rank(codes) - 1), -(-width // group)
    short = count * group - width if along == "channels" else 0
    steps = _apart(b, codes, bits, rows, width, short)
    if finer is not None:
        half = _number(b, 2 ** (bits - 1))
        less = b.node("Sub", _apart(b, finer, bits, rows, width, short), half)
        steps = b.node("Add", steps, b.node("Mul", less, _number(b, 2.0**-bits)))
    if along == "rows":
        sizes, cut = (
            b.ints(*lead, rows // group, 1, width),
            b.ints(*lead, rows // group, group, width),
        )
    else:
        sizes, cut = b.ints(*lead, rows, count, 1), b.ints(*lead, rows, count, group)
    of = [b.node("Reshape", b.node("Cast", x, to=_FLOAT), sizes) for x in (scale, least)]
    x = b.node("Add", b.node("Mul", b.node("Reshape", steps, cut), of[0]), of[1])
    if short:
        x = _last(b, str(b.node("Reshape", x, b.ints(*lead, rows, count * group))), width)
    return str(b.node("Reshape", x, b.ints(*lead[:-1], -1, width)))
