"""Comparisons, logic, selection and casts."""

from __future__ import annotations

from typing import Any

import torch

from accel.ir.errors import LoweringError
from accel.lowering.onnx.rules.aten_math import pair
from accel.lowering.onnx.writer.builder import Builder, same_shape
from accel.lowering.onnx.writer.table import lower

aten = torch.ops.aten

COMPARE = {
    "eq": "Equal",
    "lt": "Less",
    "le": "LessOrEqual",
    "gt": "Greater",
    "ge": "GreaterOrEqual",
}


def compare(b: Builder, op: str, x: Any, y: Any) -> Any:
    dtype = b.promoted(x, y)
    if dtype == torch.bool and op != "Equal":
        dtype = torch.int32
    return b.node(op, *pair(b, x, y, dtype))


def _comparison(op: str) -> Any:
    return lambda b, x, y: compare(b, op, x, y)


for _stem, _name in COMPARE.items():
    _packet = getattr(aten, _stem)
    lower(_packet.Tensor, _packet.Scalar)(_comparison(_name))


@lower(aten.ne.Tensor, aten.ne.Scalar)
def ne(b: Builder, x: Any, y: Any) -> Any:
    return b.node("Not", compare(b, "Equal", x, y))


def truth(b: Builder, x: Any) -> str:
    """A value as a bool: non-zero is true."""
    return b.operand(x, torch.bool)


@lower(aten.logical_and.default)
def logical_and(b: Builder, x: str, y: str) -> Any:
    return b.node("And", truth(b, x), truth(b, y))


@lower(aten.logical_or.default)
def logical_or(b: Builder, x: str, y: str) -> Any:
    return b.node("Or", truth(b, x), truth(b, y))


@lower(aten.logical_xor.default)
def logical_xor(b: Builder, x: str, y: str) -> Any:
    return b.node("Xor", truth(b, x), truth(b, y))


@lower(aten.logical_not.default)
def logical_not(b: Builder, x: str) -> Any:
    return b.node("Not", truth(b, x))


@lower(aten.bitwise_not.default)
def bitwise_not(b: Builder, x: str) -> Any:
    return b.node("Not" if b.out.dtype == torch.bool else "BitwiseNot", x)


def _bitwise(op: str) -> Any:
    def rule(b: Builder, x: Any, y: Any) -> Any:
        return b.node(op if b.out.dtype == torch.bool else f"Bitwise{op}", *pair(b, x, y))

    return rule


for _stem, _name in {"and": "And", "or": "Or", "xor": "Xor"}.items():
    _packet, _dunder = getattr(aten, f"bitwise_{_stem}"), getattr(aten, f"__{_stem}__")
    lower(_packet.Tensor, _packet.Scalar, _dunder.Tensor, _dunder.Scalar)(_bitwise(_name))


@lower(aten.isnan.default)
def isnan(b: Builder, x: str) -> Any:
    return b.node("IsNaN", x)


@lower(aten.isinf.default)
def isinf(b: Builder, x: str) -> Any:
    return b.node("IsInf", x)


# Selection


def where(b: Builder, condition: str, x: Any, y: Any) -> Any:
    """Where in the output's dtype, by logic for bools (ONNX Runtime has no Where of bools)."""
    condition = truth(b, condition)
    if b.out.dtype != torch.bool:
        return b.node("Where", condition, *pair(b, x, y))
    yes, no = pair(b, x, y)
    other = b.node("And", b.node("Not", condition), no)
    return b.node("Or", b.node("And", condition, yes), other)


@lower(aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf, aten.where.Scalar)
def where_self(b: Builder, condition: str, x: Any, y: Any) -> Any:
    return where(b, condition, x, y)


@lower(aten.masked_fill.Scalar, aten.masked_fill.Tensor)
def masked_fill(b: Builder, x: str, mask: str, value: Any) -> Any:
    return where(b, mask, value, x)


# Casts and copies


@lower(aten._to_copy.default, aten.to.dtype_layout)
def to_copy(b: Builder, x: str, dtype: torch.dtype | None = None, **_: Any) -> Any:
    return b.cast(x, b.out.dtype)


@lower(aten.to.dtype, aten.to.device, aten.to.other, aten.type_as.default)
def to(b: Builder, x: str, *_: Any, **__: Any) -> Any:
    return b.cast(x, b.out.dtype)


@lower(
    aten.clone.default,
    aten.contiguous.default,
    aten.alias.default,
    aten.detach.default,
    aten.lift_fresh_copy.default,
    aten.positive.default,
)
def identity(b: Builder, x: str, **_: Any) -> Any:
    return x


@lower(aten.dropout.default)
def dropout(b: Builder, x: str, p: float, train: bool) -> Any:
    if train and p > 0:
        raise LoweringError("onnx: dropout in training mode; call model.eval() before capture")
    return x


@lower(aten.native_dropout.default)
def native_dropout(b: Builder, x: str, p: float, train: bool | None) -> Any:
    return dropout(b, x, p, bool(train)), b.node("Expand", b.constant(True), b.node("Shape", x))


@lower(aten.copy.default)
def copy(b: Builder, x: str, source: str, non_blocking: bool = False) -> Any:
    fits = same_shape(b.shape(source), b.shape(x))
    source = b.cast(source, b.out.dtype)
    if fits:
        return source
    return b.node("Expand", source, b.node("Shape", x))
