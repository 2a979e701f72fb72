"""A tensor of a GGUF file as a parameter: codes where it has some, or else floats."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from accel.compiler.load.gguf._file import GgufTensor
from accel.compiler.load.gguf._forms import FORMS as PLAIN
from accel.compiler.load.gguf._forms import Form, Scales
from accel.compiler.load.gguf._grids import GRIDS
from accel.ir.codes import Coded, Codes, Levels, Made
from accel.ir.weights import Pages, Stacked, Stored

FORMS = {**PLAIN, **GRIDS}
_PIECE = 1 << 20  # numbers: what is made of them on the way stays in the processor's cache
_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}


class Unread(ValueError):
    """A type of ggml that accel does not read."""


def stored(
    name: str,
    tensor: GgufTensor,
    pages: Pages,
    rows: Tensor | None = None,
    columns: Tensor | None = None,
) -> Stored:
    """A tensor as a parameter; `rows` [N] and `columns` [K]: the order in which the model has them.

    Raises Unread for a type of which the package gguf has no floats.
    """
    kind, shape, order = tensor.kind, tensor.shape, Order(rows, columns)
    if kind in _FLOATS:
        return _floats(tensor, pages, order)
    raw = tensor.data.view(*shape[:-1], -1)
    from gguf import GGMLQuantizationType, quants

    if GGMLQuantizationType[kind] not in quants._type_traits:
        raise Unread(
            f"{name} is of ggml's type {kind}, which accel does not read; give a file in another type, such as "
            "Q4_K_M, Q8_0 or F16"
        )
    if kind in FORMS and len(shape) == 2:
        form = FORMS[kind]
        read = partial(_pieces, form, raw, shape[1], order)
        layout = form if columns is None else (form, tuple(columns.tolist()))
        return Coded.in_pieces(shape, read, layout, pages)
    return Made.of_shape(shape, partial(_computed, kind, raw, order), pages)


def in_turn(name: str, first: GgufTensor, second: GgufTensor, pages: Pages) -> Stored:
    """The rows of two tensors [N,K] in turn, [2N,K]: the first of both, then the second, …"""
    kind, shape = first.kind, first.shape
    if kind != second.kind or kind not in FORMS:
        parts = [stored(name, tensor, pages) for tensor in (first, second)]
        return Stacked.rows(parts).changed(_alternating)
    raws = [tensor.data.view(shape[0], -1) for tensor in (first, second)]
    read = partial(_alternating_pieces, FORMS[kind], raws, shape[1])
    return Coded.in_pieces((2 * shape[0], shape[1]), read, FORMS[kind], pages)


def _alternating(value: Tensor) -> Tensor:
    found: Tensor = value.unflatten(0, (2, -1)).transpose(0, 1).flatten(0, 1)
    return found


def _alternating_pieces(form: Form, raws: Sequence[Tensor], columns: int) -> Iterator[Codes]:
    count = max(1, _PIECE // columns // 2)
    for start in range(0, len(raws[0]), count):
        rows = torch.stack([raw[start : start + count] for raw in raws], 1).flatten(0, 1)
        yield _codes(form, rows, columns, Order(None, None))


@dataclass(frozen=True)
class Order:
    """In which order a model has the rows and columns of a tensor, where it is another than the file's."""

    rows: Tensor | None
    columns: Tensor | None

    def of(self, value: Tensor) -> Tensor:
        """Floats in this order."""
        value = value if self.rows is None else value[self.rows.to(value.device)]
        return value if self.columns is None else value[:, self.columns.to(value.device)]


def _floats(tensor: GgufTensor, pages: Pages, order: Order) -> Stored:
    dtype, data = _FLOATS[tensor.kind], tensor.data
    if data.data_ptr() % dtype.itemsize:  # general.alignment may be less
        data = data.clone()
    value = data.view(dtype).view(tensor.shape)
    found = Stored(value, () if dtype is torch.float32 else (Tensor.float,), pages)
    same = order.rows is None and order.columns is None
    return found if same else found.changed(order.of)


def _computed(kind: str, raw: Tensor, order: Order) -> Tensor:
    from gguf import GGMLQuantizationType, quants

    return order.of(torch.from_numpy(quants.dequantize(raw.numpy(), GGMLQuantizationType[kind])))


def _pieces(form: Form, raw: Tensor, columns: int, order: Order) -> Iterator[Codes]:
    """The codes of so many rows at a time as have about a million columns."""
    count = max(1, _PIECE // columns)
    for start in range(0, len(raw), count):
        part = slice(start, start + count)
        yield _codes(form, raw[part if order.rows is None else order.rows[part]], columns, order)


def _codes(form: Form, raw: Tensor, columns: int, order: Order) -> Codes:
    blocks = raw.unflatten(1, (-1, form.size))
    q, scales, *more = form.read(blocks)
    q, scales, groups = q.flatten(1).contiguous(), _flat(scales), None
    if order.columns is not None:
        q, groups = q[:, order.columns].contiguous(), order.columns // form.group
    zeros = torch.full((len(raw), columns // form.group), form.zero, dtype=torch.uint8)
    offsets = _flat(more[0]) if more else None
    return Codes(
        q, _numbers(scales), zeros, form.bits, form.group, groups,
        None if offsets is None else _numbers(offsets), _levels(scales), _levels(offsets),
    )  # fmt: skip


def _flat(part: Scales) -> Scales:
    """[N,B,·] -> [N,·]."""
    if isinstance(part, Levels):
        return Levels(part.coarse.flatten(1).contiguous(), part.fine.flatten(1).contiguous())
    return part.flatten(1).contiguous()


def _numbers(part: Scales) -> Tensor:
    return part.numbers() if isinstance(part, Levels) else part


def _levels(part: Scales | None) -> Levels | None:
    return part if isinstance(part, Levels) else None
