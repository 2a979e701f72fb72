"""Products, normalisation, softmax, convolution and attention."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from accel.ir.errors import LoweringError
from accel.lowering.onnx.rules.aten_logic import truth
from accel.lowering.onnx.rules.aten_math import scaled
from accel.lowering.onnx.writer.builder import MICROSOFT, Builder, Size
from accel.lowering.onnx.writer.table import lower

aten = torch.ops.aten


@lower(aten.linear.default)
def linear(b: Builder, x: str, weight: str, bias: str | None = None) -> Any:
    """x @ weight.T: a parameter of its own is stored transposed; a shared one (tied head) stays
    [out, in] and FusedMatMul reads it transposed, as fast and packed alike by ONNX Runtime."""
    right, transposed = b.linear_weight(weight)
    if not transposed:
        out = b.node("MatMul", x, right)
    else:
        out = product(b, x, right, b.out.dtype, b.rank(weight))
    return out if bias is None else b.node("Add", out, bias)


def product(
    b: Builder, x: str, y: str, dtype: torch.dtype, rank: int = 2, scale: float = 1.0
) -> str:
    """scale * x @ y with the last two axes of y exchanged."""
    if dtype == torch.float32:
        extra: dict[str, Any] = {} if scale == 1.0 else {"alpha": float(scale)}
        out = b.node("FusedMatMul", x, y, domain=MICROSOFT, transB=1, **extra)
        return str(out)
    perm = [*range(rank - 2), rank - 1, rank - 2]
    out = b.node("MatMul", x, b.node("Transpose", y, perm=perm))
    return str(out if scale == 1.0 else b.node("Mul", out, b.constant(scale, dtype)))


@lower(aten.mm.default, aten.bmm.default, aten.matmul.default, aten.mv.default, aten.dot.default)
def matmul(b: Builder, x: str, y: str) -> Any:
    return b.node("MatMul", x, y)


def _combined(b: Builder, x: str, y: str, z: str, beta: Any, alpha: Any) -> Any:
    """beta * x + alpha * (y @ z)."""
    out = scaled(b, b.node("MatMul", y, z), alpha)
    return out if beta == 0 else b.node("Add", out, scaled(b, x, beta))


@lower(aten.addmm.default, aten.baddbmm.default)
def addmm(b: Builder, x: str, y: str, z: str, beta: Any = 1, alpha: Any = 1) -> Any:
    return _combined(b, x, y, z, beta, alpha)


@lower(aten.einsum.default)
def einsum(b: Builder, equation: str, operands: Sequence[str], path: Any = None) -> Any:
    return b.node("Einsum", *operands, equation=equation.replace(" ", ""))


@lower(aten.outer.default)
def outer(b: Builder, x: str, y: str) -> Any:
    left = b.node("Unsqueeze", b.cast(x, b.out.dtype), b.ints(1))
    return b.node("Mul", left, b.cast(y, b.out.dtype))


# Softmax


@lower(aten.softmax.int)
def softmax(b: Builder, x: str, dim: int, dtype: torch.dtype | None = None) -> Any:
    return b.node("Softmax", b.cast(x, b.out.dtype), axis=dim)


@lower(aten._softmax.default)
def softmax_half(b: Builder, x: str, dim: int, half_to_float: bool) -> Any:
    return softmax(b, x, dim)


@lower(aten.log_softmax.int)
def log_softmax(b: Builder, x: str, dim: int, dtype: torch.dtype | None = None) -> Any:
    return b.node("LogSoftmax", b.cast(x, b.out.dtype), axis=dim)


@lower(aten._log_softmax.default)
def log_softmax_half(b: Builder, x: str, dim: int, half_to_float: bool) -> Any:
    return log_softmax(b, x, dim)


# Normalisation


@lower(aten.layer_norm.default)
def layer_norm(
    b: Builder,
    x: str,
    shape: Sequence[int],
    weight: str | None = None,
    bias: str | None = None,
    eps: float = 1e-5,
    *_: Any,
) -> Any:
    weight = weight or b.constant(torch.ones(tuple(shape), dtype=b.out.dtype))
    return b.node("LayerNormalization", x, weight, bias, axis=-len(shape), epsilon=float(eps))


@lower(aten.native_layer_norm.default)
def native_layer_norm(
    b: Builder, x: str, shape: Sequence[int], weight: str | None, bias: str | None, eps: float
) -> Any:
    """Output, mean and 1 / deviation, as LayerNormalization gives them."""
    weight = weight or b.constant(torch.ones(tuple(shape), dtype=b.out[0].dtype))
    return b.node(
        "LayerNormalization", x, weight, bias, axis=-len(shape), epsilon=float(eps), outputs=3
    )


@lower(aten.rms_norm.default)
def rms_norm(
    b: Builder, x: str, shape: Sequence[int], weight: str | None = None, eps: float | None = None
) -> Any:
    weight = weight or b.constant(torch.ones(tuple(shape), dtype=b.out.dtype))
    eps = torch.finfo(b.out.dtype).eps if eps is None else eps
    return b.node("RMSNormalization", x, weight, axis=-len(shape), epsilon=float(eps))


@lower(aten._fused_rms_norm.default)
def fused_rms_norm(
    b: Builder, x: str, shape: Sequence[int], weight: str | None, eps: float | None
) -> Any:
    """Output and 1 / root mean square."""
    dtype = b.out[0].dtype
    weight = weight or b.constant(torch.ones(tuple(shape), dtype=dtype))
    eps = torch.finfo(dtype).eps if eps is None else eps
    axes = b.ints(*range(-len(shape), 0))
    mean = b.node("ReduceMean", b.node("Mul", x, x), axes, keepdims=1)
    root = b.node("Sqrt", b.node("Add", mean, b.constant(eps, dtype)))
    out = b.node("RMSNormalization", x, weight, axis=-len(shape), epsilon=float(eps))
    return out, b.node("Reciprocal", root)


# Convolution


def _pads(
    padding: Sequence[int] | str, kernel: Sequence[int], dilation: Sequence[int]
) -> list[int]:
    """Of all axes before, then after; an odd "same" pads one more after."""
    if padding == "same":
        whole = [step * (size - 1) for size, step in zip(kernel, dilation, strict=True)]
        return [*(n // 2 for n in whole), *(n - n // 2 for n in whole)]
    if isinstance(padding, str):  # "valid"
        return [0] * 2 * len(kernel)
    one = list(padding) if len(padding) == len(kernel) else list(padding) * len(kernel)
    return [*one, *one]


@lower(aten.conv1d.default, aten.conv1d.padding, aten.conv2d.default, aten.conv2d.padding)
def conv(
    b: Builder,
    x: str,
    weight: str,
    bias: str | None = None,
    stride: Sequence[int] = (1,),
    padding: Sequence[int] | str = (0,),
    dilation: Sequence[int] = (1,),
    groups: int = 1,
) -> Any:
    count = b.rank(weight) - 2
    dilation = list(dilation) if len(dilation) == count else list(dilation) * count
    flat = b.rank(x) == count + 1  # without a batch axis
    data = b.node("Unsqueeze", x, b.ints(0)) if flat else x
    out = b.node(
        "Conv",
        data,
        weight,
        bias,
        strides=list(stride) if len(stride) == count else list(stride) * count,
        dilations=dilation,
        group=groups,
        pads=_pads(padding, b.shape(weight)[2:], dilation),
    )
    return b.node("Squeeze", out, b.ints(0)) if flat else out


@lower(aten.convolution.default)
def convolution(
    b: Builder,
    x: str,
    weight: str,
    bias: str | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Any:
    if transposed:
        raise LoweringError("onnx: no lowering for a transposed convolution")
    return conv(b, x, weight, bias, stride, padding, dilation, groups)


# Attention


@lower(aten.scaled_dot_product_attention.default)
def attention(
    b: Builder,
    q: str,
    k: str,
    v: str,
    mask: str | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """softmax(scale q k^T + mask) v in primitives; the query heads of a group become rows, so KV
    heads are never repeated. A row that may see nothing is 0, as in torch."""
    dtype, shape = b.out.dtype, b.shape(q)
    scale = 1 / math.sqrt(shape[-1]) if scale is None else scale
    repeats = shape[1] // b.shape(k)[1] if enable_gqa and len(shape) == 4 else 1
    rows = q
    if repeats > 1:
        rows = b.node("Reshape", q, b.ints(0, b.shape(k)[1], -1, shape[-1]))
    scores = product(b, rows, k, dtype, len(shape), scale)
    if repeats > 1:
        scores = b.node("Reshape", scores, b.concat_ints([0, shape[1], -1, _length(b, k, 2)]))
    if is_causal:
        visible = _lower_triangle(b, q, k)
    elif mask is not None and b.dtype(mask) == torch.bool:
        visible = truth(b, mask)
    else:
        visible = None
        if mask is not None:
            scores = b.node("Add", scores, b.cast(mask, dtype))
    if visible is not None:
        scores = b.node("Where", visible, scores, b.constant(-math.inf, dtype))
    weights = b.node("Softmax", scores, axis=-1)
    if mask is not None:
        weights = b.node("Where", b.node("IsNaN", weights), b.constant(0, dtype), weights)
    if repeats == 1:
        return b.node("MatMul", weights, v)
    grouped = b.concat_ints([0, b.shape(k)[1], -1, _length(b, k, 2)])
    out = b.node("MatMul", b.node("Reshape", weights, grouped), v)
    return b.node("Reshape", out, b.ints(0, shape[1], -1, b.shape(v)[-1]))


def _length(b: Builder, x: str, axis: int) -> Size:
    n = b.shape(x)[axis]
    return n if isinstance(n, int) else b.size(x, axis)


def _lower_triangle(b: Builder, q: str, k: str) -> str:
    """[T, S] bool, true where the key is not after the query."""
    places = []
    for x in (q, k):
        size = b.operand(_length(b, x, b.rank(x) - 2), torch.int64)
        zero, one = b.constant(0, torch.int64), b.constant(1, torch.int64)
        places.append(b.node("Range", zero, size, one))
    rows = b.node("Unsqueeze", places[0], b.ints(1))
    out: str = b.node("LessOrEqual", places[1], rows)
    return out


@lower(aten.glu.default)
def glu(b: Builder, x: str, dim: int = -1) -> Any:
    axis = dim % b.rank(x)
    left, gate = b.node("Split", x, axis=axis, num_outputs=2, outputs=2)
    return b.node("Mul", left, b.node("Sigmoid", gate))
