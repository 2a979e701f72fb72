"""Arithmetic on symbolic sizes: rank-0 int64 values (float64 and bool where Python gives these)."""

from __future__ import annotations

import builtins
import math
import operator
from collections.abc import Sequence
from typing import Any

import torch

from accel.lowering.onnx.rules.aten_math import floored, left_over
from accel.lowering.onnx.writer.builder import DTYPES, Builder
from accel.lowering.onnx.writer.table import lower

aten = torch.ops.aten


@lower(aten.sym_size.int)
def sym_size(b: Builder, x: str, dim: int) -> Any:
    return b.size(x, dim % b.rank(x))


@lower(aten.sym_numel.default)
def sym_numel(b: Builder, x: str) -> Any:
    return b.node("Size", x)


@lower(aten._local_scalar_dense.default, aten.item.default)
def item(b: Builder, x: str) -> Any:
    wide = torch.float64 if b.dtype(x).is_floating_point else torch.int64
    wide = torch.bool if b.dtype(x) == torch.bool else wide
    flat = x if b.rank(x) == 0 else b.node("Reshape", x, b.ints())
    return b.cast(flat, wide)


def _kind(b: Builder, *operands: Any) -> torch.dtype:
    """int64, unless an operand is a float."""
    floats = [
        b.dtype(x).is_floating_point if isinstance(x, str) else isinstance(x, float)
        for x in operands
    ]
    return torch.float64 if any(floats) else torch.int64


def _binary(op: str) -> Any:
    def rule(b: Builder, x: Any, y: Any) -> Any:
        dtype = _kind(b, x, y)
        return b.node(op, b.operand(x, dtype), b.operand(y, dtype))

    return rule


lower(operator.add)(_binary("Add"))
lower(operator.sub)(_binary("Sub"))
lower(operator.mul)(_binary("Mul"))
lower(torch.sym_max)(_binary("Max"))
lower(torch.sym_min)(_binary("Min"))
lower(operator.eq)(_binary("Equal"))
lower(operator.lt)(_binary("Less"))
lower(operator.le)(_binary("LessOrEqual"))
lower(operator.gt)(_binary("Greater"))
lower(operator.ge)(_binary("GreaterOrEqual"))


@lower(torch.sym_sum)
def sym_sum(b: Builder, terms: Sequence[Any]) -> Any:
    total = b.operand(terms[0], torch.int64)
    for term in terms[1:]:
        total = b.node("Add", total, b.operand(term, torch.int64))
    return total


@lower(operator.ne)
def ne(b: Builder, x: Any, y: Any) -> Any:
    return b.node("Not", _binary("Equal")(b, x, y))


def _natural(b: Builder, *operands: Any) -> bool:
    """Whether no operand can be negative, where division and modulo need no correction."""
    for x in operands:
        value = b.meta.get(x) if isinstance(x, str) else x
        if isinstance(value, torch.SymInt):
            if not value.node.expr.is_nonnegative:
                return False
        elif not isinstance(value, int) or value < 0:
            return False
    return True


@lower(operator.floordiv)
def floordiv(b: Builder, x: Any, y: Any) -> Any:
    dtype = _kind(b, x, y)
    left, right = b.operand(x, dtype), b.operand(y, dtype)
    if dtype == torch.float64:
        return floored(b, left, right, dtype)
    if not _natural(b, x, y):
        left = b.node("Sub", left, b.node("Mod", left, right))
    return b.node("Div", left, right)


@lower(operator.mod)
def modulo(b: Builder, x: Any, y: Any) -> Any:
    dtype = _kind(b, x, y)
    left, right = b.operand(x, dtype), b.operand(y, dtype)
    if dtype == torch.float64:
        return left_over(b, left, right, dtype)
    return b.node("Mod", left, right)


@lower(operator.truediv)
def truediv(b: Builder, x: Any, y: Any) -> Any:
    return b.node("Div", b.operand(x, torch.float64), b.operand(y, torch.float64))


@lower(operator.pow)
def power(b: Builder, x: Any, y: Any) -> Any:
    dtype = _kind(b, x, y)
    return b.node("Pow", b.operand(x, dtype), b.operand(y, dtype))


@lower(operator.neg)
def neg(b: Builder, x: str) -> Any:
    return b.node("Neg", x)


@lower(operator.and_)
def both(b: Builder, x: Any, y: Any) -> Any:
    return b.node("And", b.operand(x, torch.bool), b.operand(y, torch.bool))


@lower(operator.or_)
def either(b: Builder, x: Any, y: Any) -> Any:
    return b.node("Or", b.operand(x, torch.bool), b.operand(y, torch.bool))


@lower(torch.sym_not)
def sym_not(b: Builder, x: str) -> Any:
    return b.node("Not", x)


@lower(torch.sym_ite)
def sym_ite(b: Builder, condition: str, x: Any, y: Any) -> Any:
    dtype = _kind(b, x, y)
    return b.node("Where", condition, b.operand(x, dtype), b.operand(y, dtype))


@lower(torch.sym_float)
def sym_float(b: Builder, x: str) -> Any:
    return b.cast(x, torch.float64)


@lower(torch.sym_int, math.trunc)
def sym_int(b: Builder, x: str) -> Any:
    return b.cast(x, torch.int64)


def _rounded(op: str) -> Any:
    def rule(b: Builder, x: str) -> Any:
        if b.dtype(x) == torch.int64:
            return x
        return b.node("Cast", b.node(op, x), to=DTYPES[torch.int64])

    return rule


lower(math.floor)(_rounded("Floor"))
lower(math.ceil)(_rounded("Ceil"))
lower(builtins.round)(_rounded("Round"))


@lower(torch.sym_sqrt)
def sqrt(b: Builder, x: str) -> Any:
    return b.node("Sqrt", b.cast(x, torch.float64))
