"""Elementwise aten operators. torch promotes dtypes, ONNX does not: operands are cast first."""

from __future__ import annotations

import math
from typing import Any

import torch

from accel.ir.errors import LoweringError
from accel.lowering.onnx.writer.builder import DTYPES, MICROSOFT, Builder
from accel.lowering.onnx.writer.table import lower

aten = torch.ops.aten
_FACTORS = 63  # of a power that is multiplied out

UNARY = {  # computed in the output's dtype
    aten.neg.default: "Neg",
    aten.abs.default: "Abs",
    aten.exp.default: "Exp",
    aten.log.default: "Log",
    aten.sqrt.default: "Sqrt",
    aten.reciprocal.default: "Reciprocal",
    aten.tanh.default: "Tanh",
    aten.sigmoid.default: "Sigmoid",
    aten.erf.default: "Erf",
    aten.sin.default: "Sin",
    aten.acos.default: "Acos",
    aten.cos.default: "Cos",
    aten.sign.default: "Sign",
}
ROUNDING = {
    aten.floor.default: "Floor",
    aten.ceil.default: "Ceil",
    aten.round.default: "Round",
}


def _unary(op: str) -> Any:
    return lambda b, x: b.node(op, b.cast(x, b.out.dtype))


def _rounding(op: str) -> Any:
    return lambda b, x: b.node(op, x) if b.dtype(x).is_floating_point else x


for _op, _name in UNARY.items():
    lower(_op)(_unary(_name))
for _op, _name in ROUNDING.items():
    lower(_op)(_rounding(_name))


def pair(b: Builder, x: Any, y: Any, dtype: torch.dtype | None = None) -> tuple[str, str]:
    """Both operands in the output's dtype."""
    dtype = dtype or b.out.dtype
    return b.operand(x, dtype), b.operand(y, dtype)


def scaled(b: Builder, y: Any, alpha: Any) -> Any:
    """alpha * y, for add and sub."""
    if isinstance(alpha, str):
        return b.node("Mul", b.operand(y, b.out.dtype), b.cast(alpha, b.out.dtype))
    if alpha == 1:
        return y
    if isinstance(y, str):
        return b.node("Mul", b.cast(y, b.out.dtype), b.constant(alpha, b.out.dtype))
    return alpha * y


@lower(aten.add.Tensor, aten.add.Scalar)
def add(b: Builder, x: Any, y: Any, alpha: Any = 1) -> Any:
    op = "Or" if b.out.dtype == torch.bool else "Add"
    return b.node(op, *pair(b, x, scaled(b, y, alpha)))


@lower(aten.sub.Tensor, aten.sub.Scalar)
def sub(b: Builder, x: Any, y: Any, alpha: Any = 1) -> Any:
    return b.node("Sub", *pair(b, x, scaled(b, y, alpha)))


@lower(aten.rsub.Scalar, aten.rsub.Tensor)
def rsub(b: Builder, x: Any, y: Any, alpha: Any = 1) -> Any:
    return b.node("Sub", *pair(b, y, scaled(b, x, alpha)))


@lower(aten.mul.Tensor, aten.mul.Scalar)
def mul(b: Builder, x: Any, y: Any) -> Any:
    op = "And" if b.out.dtype == torch.bool else "Mul"
    return b.node(op, *pair(b, x, y))


@lower(aten.div.Tensor, aten.div.Scalar, aten.true_divide.Tensor)
def div(b: Builder, x: Any, y: Any) -> Any:
    return b.node("Div", *pair(b, x, y))


@lower(aten.div.Tensor_mode, aten.div.Scalar_mode)
def div_mode(b: Builder, x: Any, y: Any, rounding_mode: str | None = None) -> Any:
    if rounding_mode is None:
        return div(b, x, y)
    if rounding_mode == "floor":
        return floor_divide(b, x, y)
    quotient = b.node("Div", *pair(b, x, y))  # of integers, this truncates
    return truncated(b, quotient) if b.out.dtype.is_floating_point else quotient


@lower(aten.floor_divide.default, aten.floor_divide.Scalar)
def floor_divide(b: Builder, x: Any, y: Any) -> Any:
    left, right = pair(b, x, y)
    if b.out.dtype.is_floating_point:
        return floored(b, left, right, b.out.dtype)
    return b.node("Div", b.node("Sub", left, b.node("Mod", left, right)), right)


def floored(b: Builder, x: str, y: str, dtype: torch.dtype) -> Any:
    """Floats divided and rounded down: by what is left, since a quotient such as 1 / 0.1 rounds up to 10."""
    rest, wrong = _rest(b, x, y, dtype)
    whole = b.node("Round", b.node("Div", b.node("Sub", x, rest), y))
    whole = b.node("Sub", whole, b.node("Cast", wrong, to=DTYPES[dtype]))
    return b.node("Where", b.node("Equal", y, b.constant(0, dtype)), b.node("Div", x, y), whole)


def left_over(b: Builder, x: str, y: str, dtype: torch.dtype) -> Any:
    """What is left of floats, with the sign of y."""
    rest, wrong = _rest(b, x, y, dtype)
    return b.node("Where", wrong, b.node("Add", rest, y), rest)


def _rest(b: Builder, x: str, y: str, dtype: torch.dtype) -> tuple[str, str]:
    """What is left, with the sign of x, and where that is not y's sign."""
    rest, zero = b.node("Mod", x, y, fmod=1), b.constant(0, dtype)
    flip = b.node("Xor", b.node("Less", rest, zero), b.node("Less", y, zero))
    return rest, b.node("And", b.node("Not", b.node("Equal", rest, zero)), flip)


@lower(aten.remainder.Tensor, aten.remainder.Scalar, aten.remainder.Scalar_Tensor)
def remainder(b: Builder, x: Any, y: Any) -> Any:
    left, right = pair(b, x, y)
    if b.out.dtype.is_floating_point:
        return left_over(b, left, right, b.out.dtype)
    return b.node("Mod", left, right)


@lower(aten.fmod.Tensor, aten.fmod.Scalar)
def fmod(b: Builder, x: Any, y: Any) -> Any:
    return b.node("Mod", *pair(b, x, y), fmod=1)


@lower(aten.pow.Tensor_Scalar, aten.pow.Tensor_Tensor, aten.pow.Scalar)
def power(b: Builder, x: Any, y: Any) -> Any:
    dtype = b.out.dtype
    if not isinstance(y, str):
        if y == 1:
            return b.operand(x, dtype)
        if y == 2:
            return b.node("Mul", *pair(b, x, x))
        if y == 0.5:
            return b.node("Sqrt", b.operand(x, dtype))
        if y == -0.5:
            return rsqrt(b, x)
        if not dtype.is_floating_point and 2 < y <= _FACTORS:
            return _multiplied(b, b.operand(x, dtype), int(y))
    return b.node("Pow", *pair(b, x, y))


def _multiplied(b: Builder, x: str, exponent: int) -> str:
    """A whole number's power; ONNX Runtime's Pow goes by way of floats, which are not exact past 2^53."""
    if exponent == 1:
        return x
    half = _multiplied(b, x, exponent // 2)
    square = str(b.node("Mul", half, half))
    return square if exponent % 2 == 0 else str(b.node("Mul", square, x))


@lower(aten.square.default)
def square(b: Builder, x: str) -> Any:
    return b.node("Mul", x, x)


@lower(aten.rsqrt.default)
def rsqrt(b: Builder, x: str) -> Any:
    return b.node("Reciprocal", b.node("Sqrt", b.cast(x, b.out.dtype)))


@lower(aten.log1p.default)
def log1p(b: Builder, x: str) -> Any:
    x = b.cast(x, b.out.dtype)
    u = b.node("Add", x, b.constant(1, b.out.dtype))
    return b.node("Where", b.node("Equal", u, x), b.node("Log", u), _log1p(b, x))  # infinity, too


def _log1p(b: Builder, x: str) -> Any:
    """log(u) * x / (u - 1) with u = 1 + x makes up for the rounding of u."""
    one = b.constant(1, b.out.dtype)
    u = b.node("Add", x, one)
    ratio = b.node("Div", x, b.node("Sub", u, one))
    return b.node("Where", b.node("Equal", u, one), x, b.node("Mul", b.node("Log", u), ratio))


@lower(aten.expm1.default)
def expm1(b: Builder, x: str) -> Any:
    """tanh(x / 2) * (exp(x) + 1): no cancellation near 0."""
    x = b.cast(x, b.out.dtype)
    half = b.node("Tanh", b.node("Mul", x, b.constant(0.5, b.out.dtype)))
    return b.node("Mul", half, b.node("Add", b.node("Exp", x), b.constant(1, b.out.dtype)))


@lower(aten.exp2.default)
def exp2(b: Builder, x: str) -> Any:
    return b.node("Pow", b.constant(2, b.out.dtype), b.cast(x, b.out.dtype))


@lower(aten.log2.default)
def log2(b: Builder, x: str) -> Any:
    scale = b.constant(1.4426950408889634, b.out.dtype)
    return b.node("Mul", b.node("Log", b.cast(x, b.out.dtype)), scale)


def truncated(b: Builder, x: str) -> Any:
    """A float rounded towards zero."""
    negative = b.node("Less", x, b.constant(0, b.out.dtype))
    return b.node("Where", negative, b.node("Ceil", x), b.node("Floor", x))


@lower(aten.trunc.default)
def trunc(b: Builder, x: str) -> Any:
    return truncated(b, x) if b.out.dtype.is_floating_point else x


@lower(aten.log_sigmoid.default)
def log_sigmoid(b: Builder, x: str) -> Any:
    """min(x, 0) - log(1 + exp(-|x|)): exact where exp(x) would overflow or vanish."""
    rest = _log1p(b, b.node("Exp", b.node("Neg", b.node("Abs", x))))
    return b.node("Sub", b.node("Min", x, b.constant(0, b.out.dtype)), rest)


@lower(aten.nan_to_num.default)
def nan_to_num(b: Builder, x: str, nan: Any = None, posinf: Any = None, neginf: Any = None) -> Any:
    dtype = b.out.dtype
    if not dtype.is_floating_point:
        return x
    out = b.node("Where", b.node("IsNaN", x), b.constant(nan or 0.0, dtype), x)
    for value, infinity in ((posinf, math.inf), (neginf, -math.inf)):
        if value is not None:
            met = b.node("Equal", x, b.constant(infinity, dtype))
            out = b.node("Where", met, b.constant(value, dtype), out)
    ends = torch.finfo(dtype)
    return b.node("Clip", out, b.constant(ends.min, dtype), b.constant(ends.max, dtype))


# Activations


@lower(aten.relu.default)
def relu(b: Builder, x: str) -> Any:
    floating = b.out.dtype.is_floating_point
    return b.node("Relu", x) if floating else b.node("Max", x, b.constant(0, b.out.dtype))


@lower(aten.silu.default)
def silu(b: Builder, x: str) -> Any:
    if b.out.dtype == torch.float32:
        return b.node("QuickGelu", x, domain=MICROSOFT, alpha=1.0)
    return b.node("Mul", x, b.node("Sigmoid", x))


@lower(aten.gelu.default)
def gelu(b: Builder, x: str, approximate: str = "none") -> Any:
    return b.node("Gelu", x, approximate=approximate)


@lower(aten.softplus.default)
def softplus(b: Builder, x: str, beta: float = 1, threshold: float = 20) -> Any:
    """Past the threshold torch returns x, which Softplus past 20 equals to 2e-9."""
    scale = b.constant(beta, b.out.dtype)
    inner = x if beta == 1 else b.node("Mul", x, scale)
    out = b.node("Softplus", inner)
    out = out if beta == 1 else b.node("Div", out, scale)
    if threshold >= 20:
        return out
    return b.node("Where", b.node("Greater", inner, b.constant(threshold, b.out.dtype)), x, out)


@lower(aten.leaky_relu.default)
def leaky_relu(b: Builder, x: str, slope: float = 0.01) -> Any:
    return b.node("LeakyRelu", x, alpha=float(slope))


@lower(aten.elu.default)
def elu(b: Builder, x: str, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> Any:
    if input_scale != 1:
        raise LoweringError("onnx: no lowering for elu with an input scale")
    out = b.node("Elu", x, alpha=float(alpha))
    return out if scale == 1 else b.node("Mul", out, b.constant(scale, b.out.dtype))


@lower(aten.hardtanh.default)
def hardtanh(b: Builder, x: str, low: float = -1, high: float = 1) -> Any:
    return clamp(b, x, low, high)


# Bounds


@lower(aten.clamp.default, aten.clamp.Tensor)
def clamp(b: Builder, x: str, low: Any = None, high: Any = None) -> Any:
    x = b.cast(x, b.out.dtype)
    if isinstance(low, (int, float)) and isinstance(high, (int, float)):
        return b.node("Clip", x, b.constant(low, b.out.dtype), b.constant(high, b.out.dtype))
    if low is not None:
        x = b.node("Max", x, b.operand(low, b.out.dtype))
    return x if high is None else b.node("Min", x, b.operand(high, b.out.dtype))


@lower(aten.clamp_min.default, aten.clamp_min.Tensor)
def clamp_min(b: Builder, x: str, low: Any) -> Any:
    return clamp(b, x, low)


@lower(aten.clamp_max.default, aten.clamp_max.Tensor)
def clamp_max(b: Builder, x: str, high: Any) -> Any:
    return clamp(b, x, None, high)


@lower(aten.minimum.default, aten.min.other)
def minimum(b: Builder, x: str, y: str) -> Any:
    return b.node("And" if b.out.dtype == torch.bool else "Min", *pair(b, x, y))


@lower(aten.maximum.default, aten.max.other)
def maximum(b: Builder, x: str, y: str) -> Any:
    return b.node("Or" if b.out.dtype == torch.bool else "Max", *pair(b, x, y))


@lower(aten.lerp.Scalar, aten.lerp.Tensor)
def lerp(b: Builder, x: str, y: str, weight: Any) -> Any:
    step = b.node("Mul", b.node("Sub", y, x), b.operand(weight, b.out.dtype))
    return b.node("Add", x, step)


@lower(aten.addcmul.default)
def addcmul(b: Builder, x: str, y: str, z: str, value: Any = 1) -> Any:
    product = b.node("Mul", *pair(b, y, z))
    return b.node("Add", b.cast(x, b.out.dtype), scaled(b, product, value))
