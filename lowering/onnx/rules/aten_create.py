"""Tensors out of numbers and sizes: static small ones are constants."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from accel.lowering.onnx.writer.builder import Builder, Size
from accel.lowering.onnx.writer.table import lower

aten = torch.ops.aten
_CONSTANT = 1 << 12  # a static tensor of up to this many elements is written out


def filled(b: Builder, value: Any, sizes: Sequence[Size] | str) -> str:
    """A tensor of one value; `sizes` lists sizes, or names a 1-D int64 value."""
    shape = b.out.shape
    if all(isinstance(n, int) for n in shape):
        if not isinstance(value, str) and math.prod(shape) <= _CONSTANT:
            return b.constant(torch.full(tuple(shape), value, dtype=b.out.dtype))
        sizes = list(shape)
    at = sizes if isinstance(sizes, str) else b.concat_ints(sizes)
    out: str = b.node("Expand", b.operand(value, b.out.dtype), at)
    return out


def like(b: Builder, x: str, value: Any) -> str:
    """A tensor of one value with the sizes of x."""
    static = all(isinstance(n, int) for n in b.out.shape)
    return filled(b, value, list(b.out.shape) if static else b.node("Shape", x))


@lower(aten.full.default)
def full(b: Builder, size: Sequence[Size], value: Any, **_: Any) -> Any:
    return filled(b, value, size)


@lower(aten.zeros.default, aten.empty.memory_format)
def zeros(b: Builder, size: Sequence[Size], **_: Any) -> Any:
    return filled(b, 0, size)


@lower(aten.ones.default)
def ones(b: Builder, size: Sequence[Size], **_: Any) -> Any:
    return filled(b, 1, size)


@lower(aten.new_zeros.default, aten.new_empty.default)
def new_zeros(b: Builder, x: str, size: Sequence[Size], **_: Any) -> Any:
    return filled(b, 0, size)


@lower(aten.new_ones.default)
def new_ones(b: Builder, x: str, size: Sequence[Size], **_: Any) -> Any:
    return filled(b, 1, size)


@lower(aten.new_full.default)
def new_full(b: Builder, x: str, size: Sequence[Size], value: Any, **_: Any) -> Any:
    return filled(b, value, size)


@lower(aten.full_like.default, aten.fill.Scalar, aten.fill.Tensor)
def full_like(b: Builder, x: str, value: Any, **_: Any) -> Any:
    return like(b, x, value)


@lower(aten.zeros_like.default, aten.empty_like.default)
def zeros_like(b: Builder, x: str, **_: Any) -> Any:
    return like(b, x, 0)


@lower(aten.ones_like.default)
def ones_like(b: Builder, x: str, **_: Any) -> Any:
    return like(b, x, 1)


@lower(aten.scalar_tensor.default)
def scalar_tensor(b: Builder, value: Any, **_: Any) -> Any:
    return b.operand(value, b.out.dtype)


def ranged(b: Builder, start: Any, end: Any, step: Any) -> str:
    """Range over constants or values, exact for integer bounds."""
    bounds = (start, end, step)
    static = [v for v in bounds if not isinstance(v, str)]
    if len(static) == 3 and math.prod(b.out.shape) <= _CONSTANT:
        return b.constant(torch.arange(start, end, step, dtype=b.out.dtype))
    whole = all(
        isinstance(v, int) if not isinstance(v, str) else not b.dtype(v).is_floating_point
        for v in bounds
    )
    dtype = torch.int64 if whole else torch.float64
    made: str = b.node("Range", *(b.operand(v, dtype) for v in bounds))
    return b.cast(made, b.out.dtype) if b.out.dtype != dtype else made


@lower(aten.arange.default)
def arange(b: Builder, end: Any, **_: Any) -> Any:
    return ranged(b, 0, end, 1)


@lower(aten.arange.start)
def arange_start(b: Builder, start: Any, end: Any, **_: Any) -> Any:
    return ranged(b, start, end, 1)


@lower(aten.arange.start_step)
def arange_start_step(b: Builder, start: Any, end: Any, step: Any = 1, **_: Any) -> Any:
    return ranged(b, start, end, step)


def _triangle(upper: int) -> Any:
    def rule(b: Builder, x: str, diagonal: Size = 0) -> Any:
        at = diagonal if isinstance(diagonal, str) else b.constant(diagonal, torch.int64)
        dtype = b.out.dtype
        if dtype in {torch.float32, torch.float64, torch.int64, torch.bool}:
            return b.node("Trilu", x, at, upper=upper)
        wide = torch.float32 if dtype.is_floating_point else torch.int64
        return b.cast(b.node("Trilu", b.cast(x, wide), at, upper=upper), dtype)

    return rule


lower(aten.tril.default)(_triangle(0))
lower(aten.triu.default)(_triangle(1))
