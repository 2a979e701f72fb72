"""ggml's blocks of quantised numbers: the codes of those that are a scale times whole numbers, and the floats of all.

Bytes [N,B] of a matrix of N rows. The layouts: github.com/ggml-org/llama.cpp/blob/master/ggml/src/ggml-common.h.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from accel.compiler.load.gguf._file import GgufTensor
from accel.ir.codes import Coded, Codes, Levels, Made
from accel.ir.weights import Pages, Stored

_Scales = Tensor | Levels
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
    if kind in FORMS and len(shape) == 2:
        form = FORMS[kind]
        read = partial(_pieces, form, raw, shape[1], order)
        layout = form if columns is None else (form, tuple(columns.tolist()))
        return Coded.in_pieces(shape, read, layout, pages)
    from gguf import GGMLQuantizationType, quants

    if GGMLQuantizationType[kind] not in quants._type_traits:
        raise Unread(
            f"{name} is of ggml's type {kind}, which accel does not read; give a file in another type, such as "
            "Q4_K_M, Q8_0 or F16"
        )
    return Made.of_shape(shape, partial(_computed, kind, raw, order), pages)


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


def _flat(part: _Scales) -> _Scales:
    """[N,B,·] -> [N,·]."""
    if isinstance(part, Levels):
        return Levels(part.coarse.flatten(1).contiguous(), part.fine.flatten(1).contiguous())
    return part.flatten(1).contiguous()


def _numbers(part: _Scales) -> Tensor:
    return part.numbers() if isinstance(part, Levels) else part


def _levels(part: _Scales | None) -> Levels | None:
    return part if isinstance(part, Levels) else None


@dataclass(frozen=True)
class Form:
    """Blocks of `size` bytes: (q - zero) * scale + offset, a scale and an offset for `group` numbers.

    read: bytes [N,B,size] -> codes [N,B,·] uint8, scales [N,B,·] float32 or in two levels, and offsets where there are
    some.
    """

    size: int
    bits: int
    group: int
    zero: int
    read: Callable[[Tensor], tuple[Tensor, _Scales] | tuple[Tensor, _Scales, _Scales]]


def _float16(part: Tensor) -> Tensor:
    """Two bytes [N,B,2] -> [N,B,1]."""
    return part.contiguous().view(torch.float16)


def _half(part: Tensor) -> Tensor:
    """The same as float32."""
    return _float16(part).float()


def _split(part: Tensor, width: int, bits: int) -> Tensor:
    """Bytes [N,B,n] in runs of `width`: first the lowest bits of a run, then the next, … -> [N,B,·]."""
    runs = part.unflatten(2, (-1, 1, width))
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8).view(-1, 1)
    parts: Tensor = (runs >> shifts) & (2**bits - 1)
    return parts.flatten(2)


def _q4_0(b: Tensor) -> tuple[Tensor, Tensor]:
    return _split(b[..., 2:], 16, 4), _half(b[..., :2])


def _q4_1(b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return _split(b[..., 4:], 16, 4), _half(b[..., :2]), _half(b[..., 2:4])


def _five(high: Tensor, low: Tensor) -> Tensor:
    """Codes of 5 bits, the highest of which lie one after the other."""
    bits = (high.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8)).flatten(2) & 1
    return _split(low, 16, 4) | bits << 4


def _q5_0(b: Tensor) -> tuple[Tensor, Tensor]:
    return _five(b[..., 2:6], b[..., 6:]), _half(b[..., :2])


def _q5_1(b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return _five(b[..., 4:8], b[..., 8:]), _half(b[..., :2]), _half(b[..., 2:4])


def _q8_0(b: Tensor) -> tuple[Tensor, Tensor]:
    return b[..., 2:] ^ 128, _half(b[..., :2])


def _long(b: Tensor) -> tuple[Levels, Levels]:
    """Scales and offsets [N,B,8] of Q4_K and Q5_K: 6 bits of each, and two factors of all."""
    s = b[..., 4:16]
    first, second, both = s[..., :4], s[..., 4:8], s[..., 8:]
    scales = torch.cat([first & 63, both & 15 | first >> 2 & 48], -1)
    least = torch.cat([second & 63, both >> 4 | second >> 2 & 48], -1)
    return Levels(_float16(b[..., :2]), scales), Levels(-_float16(b[..., 2:4]), least)


def _q2_k(b: Tensor) -> tuple[Tensor, Levels, Levels]:
    scales, least = b[..., :16] & 15, b[..., :16] >> 4
    return (
        _split(b[..., 16:80], 32, 2),
        Levels(_float16(b[..., 80:82]), scales),
        Levels(-_float16(b[..., 82:]), least),
    )


def _q4_k(b: Tensor) -> tuple[Tensor, Levels, Levels]:
    return _split(b[..., 16:], 32, 4), *_long(b)


def _q5_k(b: Tensor) -> tuple[Tensor, Levels, Levels]:
    return _split(b[..., 48:], 32, 4) | _split(b[..., 16:48], 32, 1) << 4, *_long(b)


def _q3_k(b: Tensor) -> tuple[Tensor, Levels]:
    q = _split(b[..., 32:96], 32, 2) | _split(b[..., :32], 32, 1) << 2
    scales = _split(b[..., 96:104], 8, 4) | _split(b[..., 104:108], 4, 2) << 4
    return q, Levels(_float16(b[..., 108:]), scales.to(torch.int8) - 32)


def _q6_k(b: Tensor) -> tuple[Tensor, Levels]:
    q = _split(b[..., :128], 64, 4) | _split(b[..., 128:192], 32, 2) << 4
    return q, Levels(_float16(b[..., 208:]), b[..., 192:208].view(torch.int8))


FORMS = {
    "Q4_0": Form(18, 4, 32, 8, _q4_0),
    "Q4_1": Form(20, 4, 32, 0, _q4_1),
    "Q5_0": Form(22, 5, 32, 16, _q5_0),
    "Q5_1": Form(24, 5, 32, 0, _q5_1),
    "Q8_0": Form(34, 8, 32, 128, _q8_0),
    "Q2_K": Form(84, 2, 16, 0, _q2_k),
    "Q3_K": Form(110, 3, 16, 4, _q3_k),
    "Q4_K": Form(144, 4, 32, 0, _q4_k),
    "Q5_K": Form(176, 5, 32, 0, _q5_k),
    "Q6_K": Form(210, 6, 16, 32, _q6_k),
}
