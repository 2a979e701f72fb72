"""Cases of the lowerings that compute element by element, fold axes, or count sizes."""

from __future__ import annotations

import builtins
import math
import operator
from collections.abc import Iterator

import torch

from .aten_case import B, Call, In, T, bools, ints

aten = torch.ops.aten

X, Y = In(B, T, 8), In(B, T, 8)
N, M = ints(B, T), ints(B, T, low=1)
F, G = bools(B, T), bools(B, T)
MASK, SCORES = bools(B, 1, T, T), In(B, 2, T, T)
HALF, DOUBLE = In(B, T, dtype=torch.float16), In(B, T, dtype=torch.float64)
SMALL = ints(B, T, dtype=torch.int32)
POSITIVE = In(B, T, low=0.1)
LINE = In(T)
CPU = torch.device("cpu")
X_BT, Y_BT = In(B, T), In(B, T)
X_DOUBLE = In(B, T, 8, dtype=torch.float64)

UNARY = """
    neg abs exp tanh sigmoid relu erf sin cos sign floor ceil round trunc expm1 exp2 square
    silu softplus leaky_relu elu gelu hardtanh isnan isinf reciprocal
"""


def elementwise() -> Iterator[Call]:
    for name in UNARY.split():
        yield Call(getattr(aten, name).default, X)
    for name in ("sqrt", "log", "log1p", "log2", "rsqrt"):
        yield Call(getattr(aten, name).default, POSITIVE)
    for name in ("exp", "tanh", "rsqrt", "sigmoid"):
        yield Call(getattr(aten, name).default, M)
    yield Call(aten.acos.default, In(B, T, low=-1, high=1))
    for x in (N, SMALL, HALF, DOUBLE):
        yield from (
            Call(op.default, x) for op in (aten.neg, aten.abs, aten.relu, aten.floor, aten.trunc)
        )
    yield Call(aten.log1p.default, In(B, T, low=-0.0001, high=0.0001))
    endless = Call(aten.mul.Tensor, POSITIVE, math.inf)
    yield from (Call(op.default, endless) for op in (aten.log1p, aten.expm1, aten.log_sigmoid))
    yield Call(aten.expm1.default, POSITIVE)
    yield Call(aten.softplus.default, In(B, T, low=-40, high=40), 2.0, 10.0)
    yield from (Call(aten.softplus.default, X, beta, 1.0) for beta in (1.0, 2.0))
    yield Call(aten.elu.default, X, 1.5, 2.0)
    yield Call(aten.gelu.default, X, approximate="tanh")
    yield Call(aten.silu.default, DOUBLE)
    yield Call(aten.log_sigmoid.default, In(B, T, low=-200, high=200))
    low, high = Call(aten.log.default, Call(aten.relu.default, X)), Call(aten.relu.default, Y)
    broken = Call(aten.add.Tensor, low, Call(aten.reciprocal.default, high))  # -inf, inf and NaN
    yield Call(aten.nan_to_num.default, broken)
    yield Call(aten.nan_to_num.default, broken, 3.0, posinf=5.0)
    yield Call(aten.nan_to_num.default, broken, None, None, -2.5)
    yield Call(aten.nan_to_num.default, N, 1.0)
    for op in (aten.add, aten.sub, aten.mul, aten.div):
        yield Call(op.Tensor, X, Y)
        yield Call(op.Tensor, X, In(8))
        yield Call(op.Tensor, M, 2)
        yield Call(op.Tensor, M, 2.5)
        yield Call(op.Tensor, HALF, 0.5)
        yield Call(op.Tensor, N, POSITIVE)
        yield Call(op.Tensor, HALF, DOUBLE)
        yield Call(op.Scalar, X, 3)
        yield Call(op.Tensor, SMALL, M)
        yield Call(op.Tensor, LINE, T)
        yield Call(op.Tensor, LINE, In(dtype=torch.float64, low=1))
    for op in (aten.add, aten.sub, aten.rsub):
        yield Call(op.Tensor, X, Y, alpha=2)
        yield Call(op.Tensor, N, M, alpha=-1)
        yield Call(op.Scalar, X, 3, 2)
    yield Call(aten.add.Tensor, F, G)
    yield Call(aten.mul.Tensor, F, G)
    yield Call(aten.mul.Tensor, F, X_BT)
    yield Call(aten.add.Tensor, F, 1)
    yield Call(aten.true_divide.Tensor, N, M)
    yield Call(aten.rsub.Scalar, N, 1.5)
    for y in (M, POSITIVE):
        for op in (aten.remainder, aten.fmod):
            yield Call(op.Tensor, X_BT, y)
            yield Call(op.Tensor, N, y)
        yield from (
            Call(aten.div.Tensor_mode, N, y, rounding_mode=m) for m in ("floor", "trunc", None)
        )
        yield Call(aten.floor_divide.default, N, y)
    for y in (3, -3, 2.5, -2.5):
        yield from (Call(op.Scalar, N, y) for op in (aten.remainder, aten.fmod, aten.floor_divide))
        yield from (Call(aten.div.Scalar_mode, x, y, rounding_mode="trunc") for x in (N, X))
        yield Call(aten.remainder.Scalar, X, y)
        yield Call(aten.remainder.Scalar_Tensor, y, M)
    tenths = Call(aten.div.Tensor, Call(aten._to_copy.default, N, dtype=torch.float32), 10)
    for y in (0.1, -0.1, 0.0, math.inf, Y_BT):  # whole quotients, as 0.3 by 0.1, fall short of 3
        yield Call(aten.floor_divide.default, tenths, y)
        yield Call(aten.div.Tensor_mode, tenths, y, rounding_mode="floor")
    yield from (Call(aten.pow.Tensor_Scalar, POSITIVE, e) for e in (0.5, 1, 2, 3, -0.5, 2.7))
    large = ints(B, T, low=-(1 << 20), high=1 << 20)
    yield from (Call(aten.pow.Tensor_Scalar, large, e) for e in (0, 3, 4, 7))  # past 2^53, and 2^63
    yield Call(aten.pow.Tensor_Scalar, N, 2)
    yield Call(aten.pow.Tensor_Scalar, N, 3)
    yield Call(aten.pow.Tensor_Scalar, M, 0.5)
    yield Call(aten.pow.Scalar, 10000.0, X)
    yield Call(aten.pow.Scalar, 2, M)
    yield Call(aten.pow.Tensor_Tensor, POSITIVE, N)
    for low, high in ((-1, 1), (None, 0.5), (0, None), (-2.5, 1)):
        yield from (Call(aten.clamp.default, x, low, high) for x in (X, N))
    yield Call(aten.clamp.Tensor, X, Y, None)
    yield Call(aten.clamp.Tensor, X, In(8), In(T, 1, low=3, high=4))
    yield Call(aten.clamp_min.default, N, 0)
    yield Call(aten.clamp_min.Tensor, X, Y)
    yield Call(aten.clamp_max.default, X, 0.5)
    yield Call(aten.clamp_max.Tensor, X, Y)
    yield Call(aten.clamp_min.default, SMALL, 2)
    yield Call(aten.max.other, X, Y)
    yield Call(aten.min.other, N, POSITIVE)
    for op in (aten.minimum, aten.maximum):
        yield Call(op.default, X, Y)
        yield Call(op.default, N, POSITIVE)
        yield Call(op.default, F, G)
    yield Call(aten.lerp.Scalar, X, Y, 0.3)
    yield Call(aten.lerp.Tensor, X, Y, Y)
    yield Call(aten.addcmul.default, X, Y, X, value=2)
    yield Call(aten.addcmul.default, X, Y, Y)


def logic() -> Iterator[Call]:
    for name in ("eq", "ne", "lt", "le", "gt", "ge"):
        op = getattr(aten, name)
        yield Call(op.Tensor, N, POSITIVE)
        yield Call(op.Tensor, F, G)
        yield Call(op.Scalar, N, T)
        yield Call(op.Scalar, N, 1.5)
        yield Call(op.Scalar, X, 0)
        yield Call(op.Scalar, F, True)
    for name in ("logical_and", "logical_or", "logical_xor"):
        yield Call(getattr(aten, name).default, F, G)
        yield Call(getattr(aten, name).default, N, X_BT)
    yield from (Call(aten.logical_not.default, x) for x in (F, N, X))
    yield from (Call(aten.bitwise_not.default, x) for x in (F, N, SMALL))
    for name in ("bitwise_and", "bitwise_or", "bitwise_xor", "__and__", "__or__", "__xor__"):
        op = getattr(aten, name)
        yield Call(op.Tensor, F, G)
        yield Call(op.Tensor, N, M)
        yield Call(op.Tensor, F, M)
        yield Call(op.Scalar, N, 3)
        yield Call(op.Scalar, F, True)
    yield from (
        Call(aten.where.self, F, x, y)
        for x, y in ((N, M), (X_BT, POSITIVE), (F, G), (N, X_BT), (HALF, HALF))
    )
    yield Call(aten.where.ScalarOther, F, X_BT, 1.5)
    yield Call(aten.where.ScalarSelf, F, 0, X_BT)
    yield Call(aten.where.Scalar, F, 1.0, 0.0)
    yield from (
        Call(aten.masked_fill.Scalar, SCORES, MASK, v) for v in (-math.inf, -1000000000.0, 0)
    )
    yield Call(aten.masked_fill.Scalar, N, F, 5)
    yield Call(aten.masked_fill.Scalar, F, G, False)
    yield Call(aten.masked_fill.Tensor, SCORES, MASK, In())
    for dtype in (
        torch.float32,
        torch.float16,
        torch.float64,
        torch.int64,
        torch.int32,
        torch.bool,
    ):
        for x in (X, N, F, HALF):
            yield Call(aten._to_copy.default, x, dtype=dtype)
        yield Call(aten.to.dtype, N, dtype)
    yield Call(aten.to.dtype_layout, X, dtype=torch.float16, layout=torch.strided)
    yield Call(aten.to.device, X, CPU, torch.float64)
    yield Call(aten.to.other, X, HALF)
    yield Call(aten.type_as.default, N, X)
    for op in (
        aten.clone,
        aten.contiguous,
        aten.alias,
        aten.detach,
        aten.lift_fresh_copy,
        aten.positive,
    ):
        yield Call(op.default, X)
    yield Call(aten.dropout.default, X, 0.1, False)
    yield Call(aten.native_dropout.default, X, 0.1, False)
    yield Call(aten.copy.default, X, In(8))
    yield Call(aten.copy.default, N, X_BT)


def create() -> Iterator[Call]:
    yield from (
        Call(aten.full.default, s, v)
        for s, v in (([B, T], 1.5), ([2, 3], True), ([], -math.inf), ([100, 100], 2), ([T], T))
    )
    yield Call(aten.full.default, [B, T], 0, dtype=torch.int32)
    yield Call(aten.zeros.default, [B, T])
    yield Call(aten.ones.default, [T], dtype=torch.bool)
    for op in (aten.new_zeros, aten.new_ones):
        yield Call(op.default, X, [T, 2])
        yield Call(op.default, N, [3])
        yield Call(op.default, X, [B], dtype=torch.int64)
    yield Call(aten.new_full.default, X, [T, 2], 3)
    yield Call(aten.full_like.default, N, 2)
    yield Call(aten.full_like.default, In(3), 2, dtype=torch.bool)
    yield from (
        Call(op.default, x) for op in (aten.zeros_like, aten.ones_like) for x in (X, F, In(3))
    )
    yield Call(aten.fill.Scalar, X, 2)
    yield Call(aten.fill.Tensor, N, In())
    yield Call(aten.scalar_tensor.default, 2.5)
    yield Call(aten.scalar_tensor.default, T, dtype=torch.float32)
    for empty in (Call(aten.empty.memory_format, [B, T]), Call(aten.empty_like.default, N)):
        yield Call(aten.zeros_like.default, empty)
    yield Call(aten.ones_like.default, Call(aten.new_empty.default, X, [T]))
    yield Call(aten.arange.default, T)
    yield Call(aten.arange.default, 7, dtype=torch.float32)
    yield Call(aten.arange.default, T, dtype=torch.float32)
    yield Call(aten.arange.start, B, Call(operator.add, B, T))
    yield Call(aten.arange.start, -3, 4)
    yield Call(aten.arange.start_step, 0, T, 2)
    yield Call(aten.arange.start_step, 0.0, 3.0, 0.25)
    yield Call(aten.arange.start_step, 9, 0, -2)
    yield from (
        Call(op.default, x, d)
        for op in (aten.tril, aten.triu)
        for x in (SCORES, MASK, ints(T, T, dtype=torch.int32), In(T, 4))
        for d in (0, 1, -1)
    )
    yield Call(aten.triu.default, SCORES, T)


def reduce() -> Iterator[Call]:
    yield from (
        Call(op, x, *a)
        for op in (aten.sum.dim_IntList, aten.mean.dim)
        for x, a in ((X, ([-1], True)), (X, ([1, 2],)), (X, (None,)))
    )
    yield from (
        Call(op.default, X)
        for op in (aten.sum, aten.mean, aten.max, aten.min, aten.amax, aten.amin, aten.prod)
    )
    yield Call(aten.sum.dim_IntList, F, [1])
    yield Call(aten.sum.default, SMALL)
    yield Call(aten.mean.dim, N, [1], dtype=torch.float32)
    yield Call(aten.sum.dim_IntList, HALF, [1], dtype=torch.float32)
    yield from (Call(op.default, x, [1], True) for op in (aten.amax, aten.amin) for x in (X, N, F))
    yield from (
        Call(op.dim, x, 1, *k)
        for op in (aten.max, aten.min)
        for x in (X, POSITIVE)
        for k in ((), (True,))
    )
    yield Call(aten.prod.dim_int, In(B, T, 3), 2)
    yield Call(aten.logsumexp.default, X, [-1])
    yield Call(aten.logsumexp.default, X, [1], True)
    yield Call(aten.max.dim, F, 1)
    yield from (Call(aten.min.dim, x, 0) for x in (In(), bools()))
    nobody = Call(aten.index.Tensor, F, [Call(aten.lt.Scalar, N, -100)])
    for op in (aten.any, aten.all):
        yield Call(op.default, F)
        yield Call(op.default, nobody)
        yield Call(op.dim, F, 1)
        yield Call(op.dim, N, -1, True)
        yield Call(op.dims, F, [0, 1])
    yield from (Call(aten.var.dim, X, [-1], u, k) for u, k in ((True, False), (False, True)))
    yield Call(aten.var.dim, X, [1, 2], False)
    yield Call(aten.var.correction, X, [-1], correction=0, keepdim=True)
    yield Call(aten.var.correction, X, [2])
    yield Call(aten.std.correction, X, [2], correction=1)
    yield from (
        Call(aten.linalg_vector_norm.default, X, o, [-1], k)
        for o, k in ((2, True), (1, False), (math.inf, False))
    )
    yield from (
        Call(aten.cumsum.default, x, d) for x, d in ((X, 1), (N, -1), (F, 1), (SMALL, 1), (HALF, 0))
    )


def sym() -> Iterator[Call]:
    both = (
        operator.add,
        operator.sub,
        operator.mul,
        operator.floordiv,
        operator.mod,
        operator.truediv,
        torch.sym_max,
        torch.sym_min,
    )
    compare = (operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge)
    yield from (Call(aten.mul.Tensor, X, Call(op, T, y)) for op in both for y in (2, B))
    yield from (Call(op, Call(operator.sub, B, T), 3) for op in both)
    yield from (
        Call(aten.mul.Tensor, X, Call(op, Call(operator.sub, B, T), y))
        for op in (operator.floordiv, operator.mod)
        for y in (0.1, -1.5)
    )
    yield from (Call(op, T, y) for op in compare for y in (B, 3))
    yield from (
        Call(op, Call(op2, T, 3), Call(operator.eq, B, 1))
        for op in (operator.and_, operator.or_)
        for op2 in (operator.lt,)
    )
    yield Call(torch.sym_ite, Call(operator.lt, B, T), B, T)
    yield Call(torch.sym_not, Call(operator.lt, B, T))
    yield Call(torch.sym_sum, [B, T, 3])
    yield Call(operator.neg, T)
    yield Call(operator.pow, T, 2)
    yield Call(torch.sym_float, T)
    yield Call(operator.mul, T, 0.5)
    yield Call(torch.sym_sqrt, T)
    half = Call(operator.truediv, T, 2)
    yield from (
        Call(op, half) for op in (math.floor, math.ceil, math.trunc, torch.sym_int, builtins.round)
    )
    yield Call(math.ceil, T)
    yield Call(aten.sym_size.int, X, -2)
    yield Call(aten.sym_numel.default, X)
    whole = Call(aten.select.int, Call(aten.select.int, N, 0, 0), 0, 0)
    for op in (aten.item, aten._local_scalar_dense):
        yield Call(op.default, whole)
        yield Call(torch.sym_float, Call(op.default, Call(aten.sum.default, X)))


def cases() -> Iterator[Call]:
    for family in (elementwise, logic, create, reduce, sym):
        yield from family()
