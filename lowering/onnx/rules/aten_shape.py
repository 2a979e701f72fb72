"""Operators that move, cut and join elements; what changes nothing emits nothing."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from accel.ir.errors import LoweringError
from accel.lowering.onnx.writer.builder import Builder, Size, same, same_shape
from accel.lowering.onnx.writer.table import lower

aten = torch.ops.aten
END = np.iinfo(np.int64).max


@lower(
    aten.view.default,
    aten.reshape.default,
    aten._unsafe_view.default,
    aten._reshape_alias.default,
)
def view(b: Builder, x: str, size: Sequence[Size], *_: Any) -> Any:
    return b.reshape(x, size, b.out.shape)


@lower(aten.flatten.using_ints, aten.unflatten.int)
def fold(b: Builder, x: str, *_: Any) -> Any:
    sizes = sizes_of(b, b.out.shape, x)
    if -1 in sizes and not b.inferred(b.out.shape, axis := sizes.index(-1)):
        sizes[axis] = _folded(b, x, axis)
    return b.reshape(x, sizes, b.out.shape)


def _folded(b: Builder, x: str, axis: int) -> Size:
    """The size of an axis of several that became one, or of one of those that one became, by those of `x`."""
    before, after = b.shape(x), b.out.shape
    first = next(i for i, pair in enumerate(zip(before, after, strict=False)) if not same(*pair))
    more = len(after) - len(before)
    found = b.vector(b.size(x, first))
    for i in range(first + 1, first + 1 - more):
        size = before[i]
        found = b.node("Mul", found, b.vector(size if isinstance(size, int) else b.size(x, i)))
    parts = [n for i, n in enumerate(after[first : first + more + 1], first) if i != axis]
    if not all(isinstance(n, int) for n in parts):
        return -1
    if (known := math.prod(parts)) > 1:
        found = b.node("Div", found, b.ints(known))
    scalar = str(b.node("Squeeze", found))
    b.vectors[scalar] = found
    return scalar


def sizes_of(b: Builder, shape: Sequence[Any], *sources: str) -> list[Size]:
    """Numbers or names for the sizes of `shape`; a symbolic one is found in a source, or is -1."""
    return [n if isinstance(n, int) else _find(b, n, sources) for n in shape]


def _find(b: Builder, size: Any, sources: Sequence[str]) -> Size:
    for source in sources:
        for axis, other in enumerate(b.shape(source)):
            if same(size, other):
                return b.size(source, axis)
    return -1


# Order of axes


def permuted(b: Builder, x: str, perm: Sequence[int]) -> Any:
    """Transpose, unless the order stays."""
    return x if list(perm) == sorted(perm) else b.node("Transpose", x, perm=list(perm))


@lower(aten.permute.default)
def permute(b: Builder, x: str, dims: Sequence[int]) -> Any:
    return permuted(b, x, [d % len(dims) for d in dims])


@lower(aten.transpose.int)
def transpose(b: Builder, x: str, first: int, second: int) -> Any:
    perm = list(range(b.rank(x)))
    if perm:
        perm[first], perm[second] = perm[second], perm[first]
    return permuted(b, x, perm)


@lower(aten.t.default)
def t(b: Builder, x: str) -> Any:
    return permuted(b, x, list(range(b.rank(x)))[::-1])


@lower(aten.movedim.int)
def movedim(b: Builder, x: str, source: int, destination: int) -> Any:
    perm = list(range(b.rank(x)))
    perm.insert(destination % len(perm), perm.pop(source))
    return permuted(b, x, perm)


# Axes of size one


@lower(aten.unsqueeze.default)
def unsqueeze(b: Builder, x: str, dim: int) -> Any:
    return b.node("Unsqueeze", x, b.ints(dim % (b.rank(x) + 1)))


@lower(aten.squeeze.dim, aten.squeeze.dims)
def squeeze(b: Builder, x: str, dims: int | Sequence[int]) -> Any:
    shape = b.shape(x)
    wanted = [dims] if isinstance(dims, int) else dims
    axes = sorted(d % len(shape) for d in wanted if same(shape[d], 1)) if shape else []
    return b.node("Squeeze", x, b.ints(*axes)) if axes else x


@lower(aten.squeeze.default)
def squeeze_all(b: Builder, x: str) -> Any:
    return squeeze(b, x, list(range(b.rank(x))))


def expanded(b: Builder, x: str, shape: Sequence[Any], sizes: Sequence[Size]) -> Any:
    """Expand to `shape`; an axis that stays is given as 1, which needs no symbolic size."""
    source = (1,) * (len(shape) - b.rank(x)) + b.shape(x)
    if same_shape(b.shape(x), shape):
        return x
    target = [
        1 if same(old, new) else size for old, new, size in zip(source, shape, sizes, strict=True)
    ]
    return b.node("Expand", x, b.concat_ints(target))


@lower(aten.expand.default)
def expand(b: Builder, x: str, size: Sequence[Size], implicit: bool = False) -> Any:
    sizes = [n if isinstance(n, int) else s for n, s in zip(b.out.shape, size, strict=True)]
    return expanded(b, x, b.out.shape, sizes)


@lower(aten.expand_as.default)
def expand_as(b: Builder, x: str, other: str) -> Any:
    return expanded(b, x, b.out.shape, sizes_of(b, b.out.shape, other))


@lower(aten.repeat.default)
def repeat(b: Builder, x: str, repeats: Sequence[Size]) -> Any:
    missing = len(repeats) - b.rank(x)
    if missing:
        x = b.node("Unsqueeze", x, b.ints(*range(missing)))
    return x if all(n == 1 for n in repeats) else b.node("Tile", x, b.concat_ints(repeats))


@lower(aten.repeat_interleave.self_int)
def repeat_interleave(b: Builder, x: str, repeats: Size, dim: int | None = None, **_: Any) -> Any:
    if dim is None:
        x, shape, axis = b.node("Reshape", x, b.ints(-1)), (-1,), 0
    else:
        shape, axis = b.shape(x), dim % b.rank(x)
        if repeats == 1:
            return x
    target: list[Size] = [1] * (len(shape) + 1)
    target[axis + 1] = repeats
    wide = b.node("Unsqueeze", x, b.ints(axis + 1))
    wide = b.node("Expand", wide, b.concat_ints(target))
    if dim is None:
        return b.node("Reshape", wide, b.ints(-1))
    copies = b.meta[repeats] if isinstance(repeats, str) else repeats
    source = (*shape[: axis + 1], copies, *shape[axis + 1 :])
    return b.reshape(wide, sizes_of(b, b.out.shape, x), b.out.shape, source)


# Parts


def cut(b: Builder, x: str, axis: int, start: Size | None, end: Size | None, step: Size = 1) -> Any:
    """x[start:end:step] along one axis."""
    bounds = [0 if start is None else start, END if end is None else end]
    vectors = [b.vector(v) for v in bounds]
    return b.node("Slice", x, *vectors, b.ints(axis), *([] if step == 1 else [b.vector(step)]))


@lower(aten.slice.Tensor)
def slice_tensor(
    b: Builder,
    x: str,
    dim: int = 0,
    start: Size | None = None,
    end: Size | None = None,
    step: Size = 1,
) -> Any:
    axis = dim % b.rank(x)
    if step == 1 and same(b.out.shape[axis], b.shape(x)[axis]):
        return x
    return cut(b, x, axis, start, sys.maxsize if end is None else end, step)


@lower(aten.narrow.default)
def narrow(b: Builder, x: str, dim: int, start: Size, length: Size) -> Any:
    axis = dim % b.rank(x)
    if same(b.out.shape[axis], b.shape(x)[axis]):
        return x
    if isinstance(start, int) and isinstance(length, int) and (start >= 0 or start + length < 0):
        return cut(b, x, axis, start, start + length)
    tail = cut(b, x, axis, start, None)
    return cut(b, tail, axis, 0, length)


@lower(aten.select.int)
def select(b: Builder, x: str, dim: int, index: Size) -> Any:
    at = index if isinstance(index, str) else b.constant(index, torch.int64)
    return b.node("Gather", x, at, axis=dim % b.rank(x))


@lower(aten.unbind.int)
def unbind(b: Builder, x: str, dim: int = 0) -> Any:
    count = len(b.out)
    return tuple(select(b, x, dim, i) for i in range(count))


def parts(b: Builder, x: str, axis: int, sizes: Sequence[Size]) -> tuple[str, ...]:
    """x in pieces of these sizes."""
    if len(sizes) == 1:
        return (x,)
    found: tuple[str, ...] = b.node("Split", x, b.concat_ints(sizes), axis=axis, outputs=len(sizes))
    return found


@lower(aten.split_with_sizes.default)
def split_with_sizes(b: Builder, x: str, sizes: Sequence[Size], dim: int = 0) -> Any:
    return parts(b, x, dim % b.rank(x), sizes)


@lower(aten.split.Tensor)
def split(b: Builder, x: str, size: Size, dim: int = 0) -> Any:
    """Pieces of the sizes that the trace saw; where the last is symbolic it is what remains."""
    axis = dim % b.rank(x)
    sizes = [piece.shape[axis] for piece in b.out]
    if all(isinstance(n, int) for n in sizes):
        return parts(b, x, axis, sizes)
    bounds: list[Size] = [_times(b, size, i) for i in range(len(sizes))]
    return _between(b, x, axis, bounds)


@lower(aten.chunk.default)
def chunk(b: Builder, x: str, count: int, dim: int = 0) -> Any:
    """Pieces of ceil(size / count) each."""
    axis = dim % b.rank(x)
    sizes = [piece.shape[axis] for piece in b.out]
    if all(isinstance(n, int) for n in sizes):
        return parts(b, x, axis, sizes)
    total = b.node("Add", b.size(x, axis), b.constant(count - 1, torch.int64))
    size = b.node("Div", total, b.constant(count, torch.int64))
    return _between(b, x, axis, [_times(b, size, i) for i in range(len(sizes))])


def _times(b: Builder, size: Size, count: int) -> Size:
    if isinstance(size, int) or count == 0:
        return 0 if count == 0 else size * count
    return size if count == 1 else str(b.node("Mul", size, b.constant(count, torch.int64)))


def _between(b: Builder, x: str, axis: int, bounds: Sequence[Size]) -> tuple[str, ...]:
    """x cut at these places; the first of them is 0."""
    if len(bounds) == 1:
        return (x,)
    ends = [*bounds[1:], None]
    return tuple(cut(b, x, axis, lo, hi) for lo, hi in zip(bounds, ends, strict=True))


# Joins


@lower(aten.cat.default)
def cat(b: Builder, tensors: Sequence[str], dim: int = 0) -> Any:
    kept = [x for x in tensors if not same_shape(b.shape(x), (0,)) or b.out.dim() == 1]
    casts = [b.cast(x, b.out.dtype) for x in kept]
    return casts[0] if len(casts) == 1 else b.node("Concat", *casts, axis=dim % b.out.dim())


@lower(aten.stack.default)
def stack(b: Builder, tensors: Sequence[str], dim: int = 0) -> Any:
    axis = dim % b.out.dim()
    wide = [b.node("Unsqueeze", b.cast(x, b.out.dtype), b.ints(axis)) for x in tensors]
    return wide[0] if len(wide) == 1 else b.node("Concat", *wide, axis=axis)


@lower(aten.select_scatter.default)
def select_scatter(b: Builder, x: str, source: str, dim: int, index: int) -> Any:
    axis = dim % b.rank(x)
    wide = b.node("Unsqueeze", b.cast(source, b.out.dtype), b.ints(axis))
    return spliced(b, x, wide, axis, index, index + 1 if index != -1 else None)


@lower(aten.slice_scatter.default)
def slice_scatter(
    b: Builder,
    x: str,
    source: str,
    dim: int = 0,
    start: Size | None = None,
    end: Size | None = None,
    step: int = 1,
) -> Any:
    axis = dim % b.rank(x)
    if step != 1:
        return _interleaved(b, x, b.cast(source, b.out.dtype), axis, slice(start, end, step))
    if same(b.shape(source)[axis], b.shape(x)[axis]):
        return b.cast(source, b.out.dtype)
    return spliced(b, x, b.cast(source, b.out.dtype), axis, start, end)


def _interleaved(b: Builder, x: str, source: str, axis: int, places: slice) -> Any:
    """x with every so many elements of an axis replaced: one of both is taken for each place."""
    length = b.shape(x)[axis]
    if not all(isinstance(v, (int, type(None))) for v in (length, places.start, places.stop)):
        raise LoweringError("onnx: slice_scatter with a step over an axis of no fixed length")
    taken = list(range(length))
    for i, place in enumerate(range(*places.indices(length))):
        taken[place] = length + i
    both = b.node("Concat", x, source, axis=axis)
    return b.node("Gather", both, b.ints(*taken), axis=axis)


def spliced(
    b: Builder, x: str, source: str, axis: int, start: Size | None, end: Size | None
) -> Any:
    """x with the part from start to end replaced."""
    pieces = [source]
    if start is not None and start != 0:
        pieces.insert(0, cut(b, x, axis, 0, start))
    if end is not None and end != END:
        pieces.append(cut(b, x, axis, end, None))
    return pieces[0] if len(pieces) == 1 else b.node("Concat", *pieces, axis=axis)


@lower(aten.constant_pad_nd.default)
def constant_pad(b: Builder, x: str, pad: Sequence[Size], value: Any = 0) -> Any:
    rank, count = b.rank(x), len(pad) // 2
    begins: list[Size] = [0] * rank
    ends: list[Size] = [0] * rank
    for i in range(count):  # torch pads from the last axis to the first
        begins[rank - 1 - i], ends[rank - 1 - i] = pad[2 * i], pad[2 * i + 1]
    if all(n == 0 for n in pad):
        return x
    return b.node("Pad", x, b.concat_ints([*begins, *ends]), b.operand(value, b.out.dtype))


@lower(aten.pad.default)
def pad(b: Builder, x: str, pad: Sequence[Size], mode: str = "constant", value: Any = None) -> Any:
    if mode != "constant":
        raise LoweringError(f"onnx: pad in mode '{mode}'")
    return constant_pad(b, x, pad, 0 if value is None else value)


@lower(aten.flip.default)
def flip(b: Builder, x: str, dims: Sequence[int]) -> Any:
    rank, count = b.rank(x), len(dims)
    axes = b.ints(*(d % rank for d in dims))
    minus = b.ints(*[-1] * count)
    return b.node("Slice", x, minus, b.ints(*[-END] * count), axes, minus) if dims else x


@lower(aten.roll.default)
def roll(b: Builder, x: str, shifts: Sequence[Size], dims: Sequence[int] = ()) -> Any:
    if not dims:
        raise LoweringError("onnx: roll without dims")
    shape = b.shape(x)
    for shift, dim in zip(shifts, dims, strict=True):
        axis = dim % len(shape)
        length = shape[axis]
        size: Size = length if isinstance(length, int) else b.size(x, axis)
        at = _negative_mod(b, shift, size)
        x = b.node("Concat", cut(b, x, axis, at, None), cut(b, x, axis, 0, at), axis=axis)
    return x


def _negative_mod(b: Builder, shift: Size, size: Size) -> Size:
    if isinstance(shift, int) and isinstance(size, int):
        return -shift % size
    minus = b.node("Neg", b.operand(shift, torch.int64))
    out: str = b.node("Mod", minus, b.operand(size, torch.int64))
    return out
