"""Cases of the lowerings that move or look up elements, and of the products."""

from __future__ import annotations

import operator
from collections.abc import Iterator

import torch

from .aten_case import B, Call, Distinct, In, T, Weight, bools, floor, ints

aten = torch.ops.aten
ENDLESS = 2**63 - 1

X, Y = In(B, T, 8), In(B, T, 8)
HEADS = In(B, 4, T, 8)
N, M = (ints(B, T), ints(B, T, low=1))
F, G = (bools(B, T), bools(B, T))
MASK, SCORES = (bools(B, 1, T, T), In(B, 2, T, T))
HALF, DOUBLE, SMALL = (
    In(B, T, dtype=torch.float16),
    In(B, T, dtype=torch.float64),
    ints(B, T, dtype=torch.int32),
)
LINE = In(T)
IDS = ints(B, T, low=0, high=10)
ROWS = ints(B, 2, low=0, high=0)
X_BT = In(B, T)
X_DOUBLE = In(B, T, 8, dtype=torch.float64)
TABLE = Weight(16, 8)
AT = ints(2, 3, low=-4, high=3)
SMALL_IDS = ints(B, T, low=0, high=10, dtype=torch.int32)
AT2, ONCE, WHERE = (ints(2, 3, low=0, high=2), Distinct(2, pool=4), Distinct(B, T, 3, pool=8))


def shape() -> Iterator[Call]:
    for op in (aten.view, aten.reshape, aten._unsafe_view, aten._reshape_alias):
        strides = [[Call(operator.mul, T, 8), 8, 4, 1]] if op is aten._reshape_alias else []
        yield Call(op.default, X, [B, T, 2, 4], *strides)
    yield from (
        Call(aten.view.default, X, s)
        for s in ([B, -1], [-1, 8], [Call(operator.mul, B, T), 8], [T, B, 8])
    )
    yield Call(aten.view.default, X, [B, Call(operator.mul, T, 2), 4])
    yield Call(aten.view.default, X, [B, T, 8])
    yield Call(aten.flatten.using_ints, X, 1)
    yield Call(aten.flatten.using_ints, X)
    yield Call(aten.unflatten.int, X, -1, [2, 4])
    yield Call(aten.permute.default, HEADS, [0, 2, 1, -1])
    yield Call(aten.permute.default, HEADS, [0, 1, 2, 3])
    yield Call(aten.transpose.int, HEADS, 1, -2)
    yield Call(aten.transpose.int, X, 1, 1)
    yield Call(aten.t.default, N)
    yield Call(aten.movedim.int, HEADS, 1, -1)
    yield Call(aten.movedim.int, HEADS, -1, 0)
    yield from (Call(aten.unsqueeze.default, X, d) for d in (0, 2, -1, -3))
    yield from (Call(aten.squeeze.dim, In(B, 1, T), d) for d in (1, -2))
    yield Call(aten.squeeze.dims, In(1, T, 1), [0, 2])
    yield Call(aten.squeeze.default, In(1, 4, 1))
    yield from (
        Call(aten.expand.default, In(B, 1, T), s)
        for s in ([B, 4, T], [-1, 4, -1], [B, 1, T], [2, B, T, T])
    )
    yield Call(aten.expand.default, In(1, T), [B, T])
    yield Call(aten.expand_as.default, In(1, T), X_BT)
    yield from (Call(aten.repeat.default, X_BT, r) for r in ([1, 3], [2, 1, B], [1, 1]))
    yield from (
        Call(aten.repeat_interleave.self_int, x, 3, d)
        for x, d in ((HEADS, 1), (HEADS, 2), (X, -1), (X, 0), (X, None))
    )
    yield from (
        Call(aten.slice.Tensor, X, 1, *a)
        for a in ((0, ENDLESS), (1, ENDLESS), (-1, ENDLESS), (0, -1), (0, T), (None, 1), (-3, -1))
    )
    yield from (
        Call(aten.slice.Tensor, X, -1, *a) for a in ((0, 4), (1, 8, 2), (4, ENDLESS), (0, 8))
    )
    yield Call(aten.slice.Tensor, X, 1, floor(T, 2), ENDLESS)
    yield Call(aten.slice.Tensor, X, 1, 0, floor(T, 2))
    yield Call(aten.narrow.default, X, 2, 1, 3)
    yield Call(aten.narrow.default, X, 1, 0, T)
    yield Call(aten.narrow.default, X, 2, -3, 2)
    yield Call(aten.select.int, X, 1, -1)
    yield Call(aten.select.int, X, 2, 3)
    yield Call(aten.select.int, X, 1, Call(operator.sub, T, 1))
    yield Call(aten.unbind.int, In(B, T, 3), 2)
    yield Call(aten.unbind.int, In(2, T))
    yield Call(aten.unbind.int, In(1, T))
    yield Call(aten.split.Tensor, X, 4, -1)
    yield Call(aten.split.Tensor, X, 3, 2)
    yield Call(aten.split.Tensor, X, 8, 2)
    yield Call(aten.split_with_sizes.default, X, [2, 5, 1], 2)
    yield Call(aten.chunk.default, X, 2, -1)
    yield Call(aten.chunk.default, X, 1, 1)
    yield Call(aten.cat.default, [X, Y], -1)
    yield Call(aten.cat.default, [X, X_DOUBLE, Y], 1)
    yield Call(aten.cat.default, [In(0), X], 1)
    yield Call(aten.stack.default, [X, Y], -1)
    yield Call(aten.stack.default, [X, X_DOUBLE])
    yield Call(aten.stack.default, [X])
    yield from (Call(aten.select_scatter.default, X, X_BT, 2, i) for i in (0, 3, -1))
    yield from (
        Call(aten.slice_scatter.default, X, In(B, T, 3), 2, *a)
        for a in ((0, 3), (5, ENDLESS), (-4, -1), (2, 5))
    )
    yield Call(aten.slice_scatter.default, X, Y, 1, 0, ENDLESS)
    yield Call(aten.slice_scatter.default, X, In(B, T, 4), 2, 1, ENDLESS, 2)
    yield Call(aten.slice_scatter.default, X, In(B, T, 2), 2, 0, 5, 3)
    yield from (
        Call(aten.constant_pad_nd.default, x, p, v)
        for x, p, v in (
            (X, [1, 2], 0.5),
            (X, [0, 0, 3, 0], 0),
            (N, [2, 0], 7),
            (F, [1, 0], True),
            (X, [0, 0], 0),
        )
    )
    yield Call(aten.pad.default, X, [0, 0, 2, 0], "constant", None)
    yield Call(aten.pad.default, X, [1, 0], value=2.0)
    yield Call(aten.flip.default, X, [1])
    yield Call(aten.flip.default, X, [0, -1])
    yield Call(aten.roll.default, X, [1], [1])
    yield Call(aten.roll.default, X, [-3, 2], [2, 1])
    yield Call(aten.roll.default, X, [9], [2])


def index() -> Iterator[Call]:
    yield Call(aten.embedding.default, TABLE, IDS)
    yield Call(aten.embedding.default, In(11, 8), SMALL_IDS, 0)
    yield Call(aten.index_select.default, X, 2, ints(5, low=0))
    yield Call(aten.index_select.default, X, 1, ints(3, low=0, high=0))
    yield Call(aten.index_select.default, X, 2, ints(low=0))
    yield Call(aten.gather.default, X, 2, ints(B, T, 3, low=0))
    yield Call(aten.gather.default, X, 1, ints(B, 2, 8, low=0, high=0))
    mixed = In(B, 4, T, 5)
    yield Call(aten.index.Tensor, X, [None, None, AT])
    yield Call(aten.index.Tensor, In(16, T), [IDS])
    yield Call(aten.index.Tensor, mixed, [None, AT, None, AT])
    yield Call(aten.index.Tensor, mixed, [None, AT, None, ints(3, low=0, high=4)])
    yield Call(aten.index.Tensor, In(B, T, 4, 5), [None, None, AT, ints(3, low=-5, high=4)])
    yield Call(aten.index.Tensor, In(4, 5, T), [AT, ints(2, 1, low=0, high=4)])
    yield Call(
        aten.index.Tensor, X, [Call(aten.unsqueeze.default, Call(aten.arange.default, B), 1), ROWS]
    )
    yield Call(aten.index.Tensor, In(3, 4, B, T), [AT2, AT])
    yield Call(aten.index.Tensor, In(B, 4, 5, T), [None, AT, ints(3, low=0, high=4)])
    yield Call(aten.index.Tensor, MASK, [None, None, None, ROWS])
    for add in (False, True):
        yield from (
            Call(aten.index_put.default, In(4, T), [ints(2, low=0, high=1)], In(2, T), add)
            for _ in range(1 - add)
        )
        yield Call(aten.index_put.default, In(B, 3, 4, 8), [None, None, ONCE], In(B, 3, 2, 8), add)
        yield Call(aten.index_put.default, In(B, 4, T), [None, ONCE], In(2, T), add)
        yield Call(aten.index_put.default, In(4, 4), [ONCE, ONCE], In(), add)
        yield Call(aten.index_put.default, In(B, 4, 4, T), [None, ONCE, ONCE], In(2, 1), add)
    yield Call(aten.index_put.default, X_BT, [F], In())
    yield Call(aten.index_put.default, X, [F], In())
    yield Call(aten.index_put.default, N, [F], ints())
    yield Call(aten.index_copy.default, In(B, 4, T), 1, ONCE, In(B, 2, T))
    yield Call(aten.index_add.default, In(4, T), 0, ints(9, low=0, high=3), In(9, T))
    yield Call(aten.scatter.src, X, 2, WHERE, In(B, T, 8))
    yield Call(aten.scatter.value, X, 2, WHERE, 1.5)
    yield Call(aten.scatter.value, Call(aten.full.default, [B, T, 8], 0.0), -1, WHERE, 1)
    yield Call(aten.scatter_add.default, X, 2, ints(B, T, 3, low=0), In(B, T, 3))
    for name in ("topk", "sort", "argsort"):
        yield from (
            Call(getattr(aten, name).default, X, *a)
            for a in {"topk": [(3,), (2, -1, False)]}.get(name, [(), (2, True), (1,)])
        )
    yield Call(aten.topk.default, In(B, 2, T), 1, 1)
    yield Call(aten.topk.default, In(B, 64, dtype=torch.float16), 4)
    yield from (
        Call(op.stable, N, stable=True, dim=-1, descending=d)
        for op in (aten.sort, aten.argsort)
        for d in (False, True)
    )
    yield from (
        Call(op.default, X, *a)
        for op in (aten.argmax, aten.argmin)
        for a in ((), (-1,), (1, True), (None, True))
    )
    yield from (Call(aten.argmax.default, In(), *a) for a in ((), (-1,), (0, True), (None, True)))
    yield Call(aten.nonzero.default, F)
    yield Call(aten.masked_select.default, X_BT, F)
    yield Call(aten.one_hot.default, IDS, 11)
    yield Call(aten.index.Tensor, X, [F])
    yield Call(aten.index_put.default, X, [F], In(8))


def nn() -> Iterator[Call]:
    w, bias, square = (Weight(16, 8), Weight(16), In(B, 8, T))
    yield Call(aten.linear.default, X, w)
    yield Call(aten.linear.default, X, w, bias)
    yield Call(aten.linear.default, X, In(16, 8))
    yield Call(aten.linear.default, X_DOUBLE, In(16, 8, dtype=torch.float64))
    yield Call(aten.matmul.default, X, square)
    yield Call(aten.matmul.default, HEADS, In(8, 3))
    yield Call(aten.matmul.default, In(8), square)
    yield Call(aten.bmm.default, X, square)
    yield Call(aten.mm.default, In(T, 8), In(8, B))
    yield Call(aten.mv.default, In(T, 8), In(8))
    yield Call(aten.dot.default, In(8), In(8))
    yield Call(aten.outer.default, LINE, In(3))
    yield from (
        Call(aten.addmm.default, In(4), In(T, 8), In(8, 4), **k)
        for k in ({}, {"beta": 2, "alpha": 0.5}, {"beta": 0})
    )
    yield Call(aten.baddbmm.default, In(B, T, T), X, square, beta=0.5)
    yield from (
        Call(aten.einsum.default, e, [HEADS, o])
        for e, o in (("bhtd,bhsd->bhts", HEADS), ("b h t d, d e -> b t h e", In(8, 3)))
    )
    for op in (aten.softmax, aten.log_softmax):
        yield Call(op.int, SCORES, -1)
        yield Call(op.int, HALF, 1, torch.float32)
        yield Call(op.int, SCORES, 1)
    yield from (Call(op.default, SCORES, -1, False) for op in (aten._softmax, aten._log_softmax))
    scale, shift = (Weight(8), Weight(8))
    yield from (
        Call(aten.layer_norm.default, X, [8], *a) for a in ((scale, shift, 1e-06), (), (scale,))
    )
    yield Call(aten.native_layer_norm.default, X, [8], scale, shift, 1e-05)
    yield Call(aten.native_layer_norm.default, X, [8], None, None, 1e-05)
    yield from (Call(aten.rms_norm.default, X, [8], *a) for a in ((scale, 1e-06), ()))
    yield Call(aten._fused_rms_norm.default, X, [8], scale, 1e-06)
    yield Call(aten.glu.default, X, -1)
    taps = Weight(8, 1, 4)
    yield Call(aten.conv1d.default, square, taps, None, [1], [3], [1], 8)
    yield Call(aten.conv1d.default, square, In(6, 4, 3), In(6), [2], [2], [1], 2)
    yield Call(aten.conv1d.padding, square, In(6, 8, 3), None, [1], "same")
    yield Call(aten.conv1d.padding, In(B, 8, 9), In(6, 8, 3), None, [1], "same", [2])
    yield Call(aten.conv1d.padding, In(2, 8, 9), In(6, 8, 4), None, [1], "same")
    yield Call(aten.conv1d.padding, In(B, 8, 9), In(6, 8, 3), None, [1], "valid")
    yield Call(aten.convolution.default, square, taps, Weight(8), [1], [3], [1], False, [0], 8)
    yield Call(aten.conv1d.default, In(8, T), taps, None, [1], [3], [1], 8)
    yield Call(aten.conv2d.default, HEADS, In(3, 4, 3, 3, low=-0.5, high=0.5), None, [1], [1])
    yield Call(aten.conv2d.padding, HEADS, In(3, 4, 3, 3, low=-0.5, high=0.5), None, [1], "same")
    sdpa, kv = (aten.scaled_dot_product_attention.default, In(B, 4, 7, 8))
    yield Call(sdpa, HEADS, HEADS, HEADS)
    yield Call(sdpa, HEADS, HEADS, HEADS, is_causal=True)
    yield Call(sdpa, HEADS, kv, kv, scale=0.3)
    yield Call(sdpa, HEADS, kv, kv, In(B, 1, T, 7))
    yield Call(sdpa, HEADS, kv, kv, bools(B, 1, T, 7))
    yield Call(sdpa, HEADS, kv, kv, bools(T, 7))
    yield Call(sdpa, X, X, X, is_causal=True)
    few = In(B, 2, T, 8)
    yield Call(sdpa, HEADS, few, few, is_causal=True, enable_gqa=True)
    yield Call(sdpa, HEADS, few, In(B, 2, T, 6), enable_gqa=True)
    yield Call(sdpa, HEADS, few, few, MASK, enable_gqa=True)


def cases() -> Iterator[Call]:
    for family in (shape, index, nn):
        yield from family()
