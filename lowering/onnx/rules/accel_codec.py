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


@lower(codec.look_up_rows.default)
def look_up_rows(b: Builder, q: str, table: str, scale: str | None = None) -> str:
    numbers = b.node("Gather", table, b.node("Cast", q, to=DTYPES[torch.int32]), axis=0)
    return str(
        numbers if scale is None else b.node("Mul", numbers, b.node("Unsqueeze", scale, b.ints(-1)))
    )
