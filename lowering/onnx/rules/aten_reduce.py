"""Operators that fold axes away, and running sums."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from accel.ir.errors import LoweringError
from accel.lowering.onnx.rules.aten_logic import truth
from accel.lowering.onnx.writer.builder import Builder
from accel.lowering.onnx.writer.table import lower

aten = torch.ops.aten
Dims = int | Sequence[int] | None


def axes_of(b: Builder, x: str, dims: Dims) -> list[int]:
    """The reduced axes, counted from the front; none given means all."""
    rank = b.rank(x)
    if dims is None or dims == []:
        return list(range(rank))
    listed = [dims] if isinstance(dims, int) else dims
    return sorted(d % rank for d in listed) if rank else []


def reduced(b: Builder, op: str, x: str, dims: Dims, keepdim: bool, dtype: torch.dtype) -> str:
    """One Reduce node in `dtype`."""
    axes = axes_of(b, x, dims)
    value = b.cast(x, dtype)
    if not axes:
        return value
    out: str = b.node(op, value, b.ints(*axes), keepdims=int(keepdim))
    return out


@lower(aten.sum.dim_IntList, aten.sum.default)
def total(b: Builder, x: str, dims: Dims = None, keepdim: bool = False, **_: Any) -> Any:
    return reduced(b, "ReduceSum", x, dims, keepdim, b.out.dtype)


@lower(aten.mean.dim, aten.mean.default)
def mean(b: Builder, x: str, dims: Dims = None, keepdim: bool = False, **_: Any) -> Any:
    return reduced(b, "ReduceMean", x, dims, keepdim, b.out.dtype)


@lower(aten.prod.dim_int, aten.prod.default)
def prod(b: Builder, x: str, dims: Dims = None, keepdim: bool = False, **_: Any) -> Any:
    return reduced(b, "ReduceProd", x, dims, keepdim, b.out.dtype)


@lower(aten.logsumexp.default)
def logsumexp(b: Builder, x: str, dims: Dims = None, keepdim: bool = False) -> Any:
    return reduced(b, "ReduceLogSumExp", x, dims, keepdim, b.out.dtype)


def _extreme(op: str) -> Any:
    def rule(b: Builder, x: str, dims: Dims = None, keepdim: bool = False) -> Any:
        dtype = b.out.dtype
        wide = torch.int32 if dtype == torch.bool else dtype
        out = reduced(b, op, x, dims, keepdim, wide)
        return b.cast(out, dtype) if wide != dtype else out

    return rule


lower(aten.amax.default, aten.max.default)(_extreme("ReduceMax"))
lower(aten.amin.default, aten.min.default)(_extreme("ReduceMin"))


def _extreme_and_place(op: str, place: str) -> Any:
    def rule(b: Builder, x: str, dim: int, keepdim: bool = False) -> Any:
        dtype = b.out[0].dtype
        wide = torch.int32 if dtype == torch.bool else dtype
        values = reduced(b, op, x, dim, keepdim, wide)
        if not b.rank(x):
            return values if wide == dtype else b.cast(values, dtype), b.constant(0, torch.int64)
        places = b.node(place, b.cast(x, wide), axis=dim, keepdims=int(keepdim))
        return (b.cast(values, dtype) if wide != dtype else values), places

    return rule


lower(aten.max.dim)(_extreme_and_place("ReduceMax", "ArgMax"))
lower(aten.min.dim)(_extreme_and_place("ReduceMin", "ArgMin"))


def _logical(op: str) -> Any:
    def rule(b: Builder, x: str, dims: Dims = None, keepdim: bool = False) -> Any:
        axes = axes_of(b, x, dims)
        flags = truth(b, x)
        if not axes:
            return flags
        found = b.node(op, b.cast(flags, torch.int32), b.ints(*axes), keepdims=int(keepdim))
        return b.node("Greater", found, b.constant(0, torch.int32))  # of nothing the least number

    return rule


lower(aten.any.default, aten.any.dim, aten.any.dims)(_logical("ReduceMax"))
lower(aten.all.default, aten.all.dim, aten.all.dims)(_logical("ReduceMin"))


def variance(b: Builder, x: str, dims: Dims, correction: float, keepdim: bool) -> Any:
    """sum((x - mean)^2) / (n - correction)."""
    dtype = b.out.dtype
    axes = axes_of(b, x, dims)
    middle = b.node("ReduceMean", x, b.ints(*axes), keepdims=1)
    centred = b.node("Sub", x, middle)
    squares = b.node("Mul", centred, centred)
    counts = [b.shape(x)[a] for a in axes]
    if all(isinstance(n, int) for n in counts):
        rest = math.prod(counts) - correction
        out = b.node("ReduceSum", squares, b.ints(*axes), keepdims=int(keepdim))
        return b.node("Div", out, b.constant(rest, dtype))
    count = b.size(x, axes[0])
    for axis in axes[1:]:
        count = b.node("Mul", count, b.size(x, axis))
    rest_ = b.node("Sub", b.node("Cast", count, to=1), b.constant(correction, torch.float32))
    out = b.node("ReduceSum", squares, b.ints(*axes), keepdims=int(keepdim))
    return b.node("Div", out, b.node("CastLike", rest_, out))


@lower(aten.var.dim)
def var_dim(
    b: Builder, x: str, dims: Dims = None, unbiased: bool = True, keepdim: bool = False
) -> Any:
    return variance(b, x, dims, float(unbiased), keepdim)


@lower(aten.var.correction)
def var_correction(
    b: Builder,
    x: str,
    dims: Dims = None,
    correction: float | None = None,
    keepdim: bool = False,
) -> Any:
    return variance(b, x, dims, 1.0 if correction is None else correction, keepdim)


@lower(aten.std.correction)
def std_correction(
    b: Builder,
    x: str,
    dims: Dims = None,
    correction: float | None = None,
    keepdim: bool = False,
) -> Any:
    return b.node("Sqrt", var_correction(b, x, dims, correction, keepdim))


@lower(aten.linalg_vector_norm.default)
def vector_norm(
    b: Builder, x: str, ord: float = 2, dims: Dims = None, keepdim: bool = False, **_: Any
) -> Any:
    ops = {1: "ReduceL1", 2: "ReduceL2"}
    if ord in ops:
        return reduced(b, ops[int(ord)], x, dims, keepdim, b.out.dtype)
    if ord == math.inf:
        size = b.node("Abs", b.cast(x, b.out.dtype))
        return b.node("ReduceMax", size, b.ints(*axes_of(b, x, dims)), keepdims=int(keepdim))
    raise LoweringError(f"onnx: a vector norm of order {ord}")


@lower(aten.cumsum.default)
def cumsum(b: Builder, x: str, dim: int, **_: Any) -> Any:
    """ONNX Runtime has CumSum for 32- and 64-bit numbers."""
    dtype = b.out.dtype
    if b.rank(x) == 0:
        return b.cast(x, dtype)
    small = {torch.float16: torch.float32, torch.bfloat16: torch.float32}
    wide = small.get(dtype, dtype)
    out = b.node("CumSum", b.cast(x, wide), b.constant(dim % b.rank(x), torch.int64))
    return b.cast(out, dtype) if wide != dtype else out
