"""Keys and values in few bits."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from accel.ir.ops.op import Op

LEVELS = 127  # of int8, to either side of 0
_LEAST = 1e-30  # the largest number of a row at least, so that a row of zeros has a step too


def _encode_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    # x * 0 is 0 for all but what is no finite number: a row that holds one has the scale NaN
    scale = x.abs().amax(-1).clamp(min=_LEAST) / LEVELS + (x * 0).sum(-1)
    steps = (x / scale.unsqueeze(-1)).round()
    return torch.where(steps.isnan(), 0, steps).to(torch.int8), scale


# x [..,D] -> q int8 [..,D], scale [..]: each row in 255 steps of its own, from its largest number down
# to the negative of that. A row that holds NaN or an infinity is NaN when it is read back.
encode_rows = Op(
    "encode_rows",
    "(Tensor x) -> (Tensor, Tensor)",
    reference=_encode_rows,
    shape=lambda x: (x.new_empty(x.shape, dtype=torch.int8), x.new_empty(x.shape[:-1])),
)

# q int8 [..,D], scale [..] -> [..,D]
decode_rows = Op(
    "decode_rows",
    "(Tensor q, Tensor scale) -> Tensor",
    reference=lambda q, scale: q * scale.unsqueeze(-1),
    shape=lambda q, scale: scale.new_empty(q.shape),
)


def _look_up_rows(q: Tensor, table: Tensor, scale: Tensor | None = None) -> Tensor:
    numbers = table[q.int()]
    return numbers if scale is None else numbers * scale.unsqueeze(-1)


# q uint8 [..,D], places in a table [n] of no more than 256 numbers; scale [..] or none -> [..,D]
look_up_rows = Op(
    "look_up_rows",
    "(Tensor q, Tensor table, Tensor? scale=None) -> Tensor",
    reference=_look_up_rows,
    shape=lambda q, table, scale=None: table.new_empty(q.shape),
)


MOST_HALF = 65504.0  # of float16


# x [..,D] -> float16 [..,D]: the nearest one, of what is beyond 65504 that, of what is no finite number NaN.
encode_halves = Op(
    "encode_halves",
    "(Tensor x) -> Tensor",
    # x * 0 is 0 for all but what is no finite number
    reference=lambda x: (x.clamp(-MOST_HALF, MOST_HALF) + x * 0).to(torch.float16),
    shape=lambda x: x.new_empty(x.shape, dtype=torch.float16),
)

# float16 [..,D] -> [..,D]
decode_halves = Op(
    "decode_halves",
    "(Tensor q) -> Tensor",
    reference=lambda q: q.float(),
    shape=lambda q: q.new_empty(q.shape, dtype=torch.float32),
)


def ends(bits: int) -> tuple[int, int]:
    """The least and the largest code."""
    return -(1 << bits - 1), (1 << bits - 1) - 1


def _encode_static(x: Tensor, scale: Tensor, bits: int) -> Tensor:
    least, most = ends(bits)
    steps = (x * (1 / scale).unsqueeze(1)).round()
    codes = torch.where(steps.isnan(), most, steps).clamp(least, most)
    if bits == 8:
        return codes.to(torch.int8)
    low, high = pad(codes - least, (0, x.shape[-1] % 2)).unflatten(-1, (-1, 2)).unbind(-1)
    both: Tensor = (low + 16 * high).to(torch.uint8)
    return both


# x [B,G,T,D], scale [1,1] or [G,D], bits 8 or 4 -> q int8 [B,G,T,D], or uint8 [B,G,T,ceil(D/2)]: the whole number
# nearest to x times 1/scale (float32; between two, the even one), from -128 to 127, or from -8 to 7 with 8 added, the
# even channel in the lower half of a byte. Beyond these the nearest one; of NaN the largest. So does onnxruntime's
# GroupQueryAttention.
encode_static = Op(
    "encode_static",
    "(Tensor x, Tensor scale, int bits) -> Tensor",
    reference=_encode_static,
    shape=lambda x, scale, bits: (
        x.new_empty(x.shape, dtype=torch.int8)
        if bits == 8
        else x.new_empty((*x.shape[:-1], (x.shape[-1] + 1) // 2), dtype=torch.uint8)
    ),
)


def _decode_static(q: Tensor, scale: Tensor, bits: int, width: int) -> Tensor:
    codes = q
    if bits == 4:
        codes = torch.stack((q & 15, q >> 4), -1).flatten(-2)[..., :width].to(torch.int8) - 8
    numbers: Tensor = codes * scale.unsqueeze(1)
    return numbers


# what `encode_static` gave of `width` = D numbers -> [B,G,C,D]
decode_static = Op(
    "decode_static",
    "(Tensor q, Tensor scale, int bits, int width) -> Tensor",
    reference=_decode_static,
    shape=lambda q, scale, bits, width: scale.new_empty((*q.shape[:-1], width)),
)
