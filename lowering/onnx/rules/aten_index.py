"""Operators that look elements up, write them by index, or order them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from accel.ir.errors import LoweringError
from accel.lowering.onnx.rules.aten_logic import where
from accel.lowering.onnx.rules.aten_shape import permuted, sizes_of
from accel.lowering.onnx.writer.builder import Builder, Size, same, same_shape
from accel.lowering.onnx.writer.table import lower

aten = torch.ops.aten
Indices = Sequence[str | None]


@lower(aten.embedding.default)
def embedding(b: Builder, weight: str, ids: str, *_: Any, **__: Any) -> Any:
    return b.node("Gather", weight, ids, axis=0)


@lower(aten.index_select.default)
def index_select(b: Builder, x: str, dim: int, index: str) -> Any:
    index = index if b.rank(index) else b.node("Reshape", index, b.ints(1))  # the axis stays
    return b.node("Gather", x, index, axis=dim % b.rank(x))


@lower(aten.gather.default)
def gather(b: Builder, x: str, dim: int, index: str, sparse_grad: bool = False) -> Any:
    return b.node("GatherElements", x, index, axis=dim % b.rank(x))


def _integers(b: Builder, indices: Indices) -> tuple[list[int], list[str], list[tuple[Any, ...]]]:
    """The axes that are indexed, their integer indices and the shapes of these."""
    axes: list[int] = []
    found: list[str] = []
    shapes: list[tuple[Any, ...]] = []
    axis = 0
    for index in indices:
        if index is None:
            axis += 1
        elif b.dtype(index) == torch.bool:
            places = b.node("NonZero", index)
            for i in range(b.rank(index)):
                found.append(b.node("Gather", places, b.constant(i, torch.int64), axis=0))
                axes.append(axis)
                shapes.append((index,))  # as many as the mask has true elements
                axis += 1
        else:
            axes.append(axis)
            found.append(index)
            shapes.append(b.shape(index))
            axis += 1
    return axes, found, shapes


def _tuples(b: Builder, indices: Sequence[str], shapes: Sequence[tuple[Any, ...]]) -> str:
    """Integer indices broadcast together and stacked on a last axis, as GatherND takes them."""
    parts = list(indices)
    if not all(_alike(shape, shapes[0]) for shape in shapes):
        total = parts[0]
        for part in parts[1:]:
            total = b.node("Add", b.cast(total, torch.int64), b.cast(part, torch.int64))
        shape = b.node("Shape", total)
        parts = [b.node("Expand", part, shape) for part in parts]
    last = b.ints(-1)
    columns = [b.node("Unsqueeze", b.cast(part, torch.int64), last) for part in parts]
    out: str = columns[0] if len(columns) == 1 else b.node("Concat", *columns, axis=-1)
    return out


def _alike(a: tuple[Any, ...], b: tuple[Any, ...]) -> bool:
    """Whether two index shapes are known to be equal; that of a mask's places is its name."""
    if any(isinstance(n, str) for n in (*a, *b)):
        return a == b
    return same_shape(a, b)


def _forward(axes: Sequence[int], rank: int) -> list[int]:
    """The order of axes that puts the indexed ones first."""
    return [*axes, *(i for i in range(rank) if i not in axes)]


@lower(aten.index.Tensor)
def index_tensor(b: Builder, x: str, indices: Indices) -> Any:
    axes, found, shapes = _integers(b, indices)
    if len(axes) == 1:
        return b.node("Gather", x, found[0], axis=axes[0])
    rank = b.rank(x)
    front = permuted(b, x, _forward(axes, rank))
    out = b.node("GatherND", front, _tuples(b, found, shapes))
    together = axes == list(range(axes[0], axes[0] + len(axes)))
    if not together or axes[0] == 0:
        return out
    before, width = axes[0], max(len(s) for s in shapes)  # the new axes go where the old ones were
    total = width + rank - len(axes)
    moved = list(range(width))
    return permuted(b, out, [*range(width, width + before), *moved, *range(width + before, total)])


@lower(aten.index_put.default)
def index_put(b: Builder, x: str, indices: Indices, values: str, accumulate: bool = False) -> Any:
    mask = indices[0]
    alone = mask is not None and len(indices) == 1 and b.dtype(mask) == torch.bool
    if mask is not None and alone and not accumulate and b.rank(values) == 0:
        missing = b.rank(x) - b.rank(mask)
        axes = range(b.rank(mask), b.rank(x))
        return where(b, b.node("Unsqueeze", mask, b.ints(*axes)) if missing else mask, values, x)
    axes_, found, shapes = _integers(b, indices)
    rank = b.rank(x)
    order = _forward(axes_, rank)
    front = permuted(b, x, order)
    places = _tuples(b, found, shapes)
    head = b.node("Slice", b.node("Shape", places), b.ints(0), b.ints(-1), b.ints(0))
    tail = b.node("Shape", front, start=len(axes_))
    whole = head if len(axes_) == rank else b.node("Concat", head, tail, axis=0)
    values = _in_front(b, values, axes_, rank, max(len(s) for s in shapes))
    updates = b.node("Expand", values, whole)
    extra: dict[str, Any] = {"reduction": "add"} if accumulate else {}
    out = b.node("ScatterND", front, places, updates, **extra)
    return permuted(b, out, [order.index(i) for i in range(rank)])


def _in_front(b: Builder, values: str, axes: Sequence[int], rank: int, width: int) -> str:
    """Values laid out as x[indices] is, with the `width` axes of the indices moved to the front."""
    full = width + rank - len(axes)
    missing = full - b.rank(values)
    values = b.cast(values, b.out.dtype)
    together = list(axes) == list(range(axes[0], axes[0] + len(axes)))
    before = axes[0] if together else 0
    if before == 0 or missing == full:
        return values
    if missing:
        values = b.node("Unsqueeze", values, b.ints(*range(missing)))
    return str(permuted(b, values, _forward(range(before, before + width), full)))


def _rows(b: Builder, x: str, dim: int, index: str, source: str, **extra: Any) -> Any:
    """Whole slices of x along one axis written (or added) by a 1-D index."""
    rank = b.rank(x)
    order = _forward([dim % rank], rank)
    places = b.node("Unsqueeze", b.cast(index, torch.int64), b.ints(-1))
    out = b.node("ScatterND", permuted(b, x, order), places, permuted(b, source, order), **extra)
    return permuted(b, out, [order.index(i) for i in range(rank)])


@lower(aten.index_copy.default)
def index_copy(b: Builder, x: str, dim: int, index: str, source: str) -> Any:
    return _rows(b, x, dim, index, source)


@lower(aten.index_add.default)
def index_add(b: Builder, x: str, dim: int, index: str, source: str, alpha: Any = 1) -> Any:
    if alpha != 1:
        raise LoweringError("onnx: index_add with alpha")
    return _rows(b, x, dim, index, source, reduction="add")


@lower(aten.scatter.src)
def scatter(b: Builder, x: str, dim: int, index: str, source: str) -> Any:
    return _scattered(b, x, dim, index, source)


@lower(aten.scatter_add.default)
def scatter_add(b: Builder, x: str, dim: int, index: str, source: str) -> Any:
    return _scattered(b, x, dim, index, source, reduction="add")


def _scattered(b: Builder, x: str, dim: int, index: str, source: str, **extra: Any) -> Any:
    if not same_shape(b.shape(index), b.shape(source)):  # torch ignores what the index leaves out
        rank = b.rank(source)
        zeros, axes = b.ints(*[0] * rank), b.ints(*range(rank))
        source = b.node("Slice", source, zeros, b.node("Shape", index), axes)
    return b.node("ScatterElements", x, index, source, axis=dim % b.rank(x), **extra)


@lower(aten.scatter.value)
def scatter_value(b: Builder, x: str, dim: int, index: str, value: Any) -> Any:
    source = b.node("Expand", b.operand(value, b.out.dtype), b.node("Shape", index))
    return b.node("ScatterElements", x, index, source, axis=dim % b.rank(x))


# Order


def sorted_pair(
    b: Builder, x: str, count: Size, dim: int, largest: bool, in_order: bool = True
) -> tuple[str, str]:
    """The `count` largest or smallest along an axis, and where they are; ties by lower index."""
    dtype = b.dtype(x)
    wide = x
    if dtype not in {torch.float32, torch.float64, torch.int64, torch.int32}:
        wide = b.cast(x, torch.float32 if dtype.is_floating_point else torch.int32)
    order: dict[str, Any] = {"largest": int(largest), "sorted": int(in_order)}
    values, places = b.node("TopK", wide, b.vector(count), axis=dim, outputs=2, **order)
    return (values if wide == x else b.cast(values, dtype)), places


@lower(aten.topk.default)
def topk(
    b: Builder, x: str, k: Size, dim: int = -1, largest: bool = True, sorted: bool = True
) -> Any:
    return sorted_pair(b, x, k, dim, largest, sorted)


def _sorted(b: Builder, x: str, dim: int, descending: bool) -> tuple[str, str]:
    (length,) = sizes_of(b, [b.shape(x)[dim]], x)
    return sorted_pair(b, x, length, dim, descending)


@lower(aten.sort.default)
def sort(b: Builder, x: str, dim: int = -1, descending: bool = False) -> Any:
    return _sorted(b, x, dim, descending)


@lower(aten.sort.stable)
def sort_stable(
    b: Builder, x: str, stable: bool | None = None, dim: int = -1, descending: bool = False
) -> Any:
    return _sorted(b, x, dim, descending)


@lower(aten.argsort.default)
def argsort(b: Builder, x: str, dim: int = -1, descending: bool = False) -> Any:
    return _sorted(b, x, dim, descending)[1]


@lower(aten.argsort.stable)
def argsort_stable(
    b: Builder, x: str, stable: bool, dim: int = -1, descending: bool = False
) -> Any:
    return _sorted(b, x, dim, descending)[1]


def _extreme(op: str) -> Any:
    def rule(b: Builder, x: str, dim: int | None = None, keepdim: bool = False) -> Any:
        if dim is not None and b.rank(x):
            return b.node(op, x, axis=dim, keepdims=int(keepdim))
        found = b.node(op, b.node("Reshape", x, b.ints(-1)), axis=0, keepdims=0)
        return b.node("Reshape", found, b.ints(*[1] * b.rank(x))) if keepdim else found

    return rule


lower(aten.argmax.default)(_extreme("ArgMax"))
lower(aten.argmin.default)(_extreme("ArgMin"))


@lower(aten.nonzero.default)
def nonzero(b: Builder, x: str) -> Any:
    return b.node("Transpose", b.node("NonZero", x), perm=[1, 0])


@lower(aten.masked_select.default)
def masked_select(b: Builder, x: str, mask: str) -> Any:
    if not same(b.rank(x), b.rank(mask)) or not same_shape(b.shape(x), b.shape(mask)):
        raise LoweringError("onnx: masked_select with a mask that broadcasts")
    flat = b.ints(-1)
    return b.node("Compress", b.node("Reshape", x, flat), b.node("Reshape", mask, flat))


@lower(aten.one_hot.default)
def one_hot(b: Builder, x: str, num_classes: int = -1) -> Any:
    if num_classes < 0:
        raise LoweringError("onnx: one_hot without num_classes")
    return b.node("OneHot", x, b.ints(num_classes), b.ints(0, 1))
