"""What lies beside blocks of codes (low-rank products, numbers at places), and rows of which few numbers are there."""

from __future__ import annotations

import torch
from torch import Tensor

from accel.ir.ops.op import Op


def _like(x: Tensor, *_: object) -> Tensor:
    return x.new_empty(x.shape)


def _add_product(x: Tensor, a: Tensor, b: Tensor, rows: int) -> Tensor:
    width = x.shape[-1]
    left = a.float().unflatten(-1, (rows, -1))
    right = b.float().unflatten(-1, (width, -1))
    found: Tensor = x + (left @ right.mT).flatten(2, 3)
    return found


# x [B,G,P R,D], of P blocks of R = `rows` rows, a [B,G,P,R r], b [B,G,P,D r] float16 -> x and of each block the product
# [R,r] [r,D].
add_product = Op(
    "add_product",
    "(Tensor x, Tensor a, Tensor b, int rows) -> Tensor",
    reference=_add_product,
    shape=_like,
)


def _put_numbers(x: Tensor, value: Tensor, place: Tensor, rows: int, along: str) -> Tensor:
    blocks = x.unflatten(2, (-1, rows))
    lines = blocks.mT if along == "rows" else blocks
    count = lines.shape[-2]
    values, places = (part.unflatten(-1, (count, -1)) for part in (value.float(), place.long()))
    put = lines.scatter(-1, places, values)
    found: Tensor = (put.mT if along == "rows" else put).flatten(2, 3)
    return found


# x [B,G,P R,D], of P blocks of R = `rows` rows, with n numbers of each line of a block in the place of its own: value
# float16, place uint8 or int64, [B,G,P,lines n]. A line is a channel's rows (along "rows") or a row's channels.
put_numbers = Op(
    "put_numbers",
    "(Tensor x, Tensor value, Tensor place, int rows, str along) -> Tensor",
    reference=_put_numbers,
    shape=_like,
)


def _spread_rows(value: Tensor, mask: Tensor, rows: int, width: int) -> Tensor:
    values, masks = (x.unflatten(-1, (rows, -1)).flatten(2, 3) for x in (value, mask))
    shifts = torch.arange(8, dtype=torch.uint8, device=mask.device)[:, None]
    bits = (masks.unsqueeze(-2) >> shifts & 1).flatten(-2)[..., :width]
    place = (bits.cumsum(-1) - 1).clamp(min=0)
    return torch.where(bits > 0, values.float().gather(-1, place), 0.0)


# value float16 [B,G,P,R k], mask uint8 [B,G,P,R ceil(D/8)], of blocks of R = `rows` rows -> float32 [B,G,P R,D], D =
# `width`: of each row its k numbers where the mask has ones, as many, and 0 elsewhere. A row's n bytes hold the bits of
# its first n channels in their lowest bits, the next n above them, and so on, as `group_quantize` lays out codes.
spread_rows = Op(
    "spread_rows",
    "(Tensor value, Tensor mask, int rows, int width) -> Tensor",
    reference=_spread_rows,
    shape=lambda value, mask, rows, width: value.new_empty(
        (*value.shape[:-2], value.shape[-2] * rows, width), dtype=torch.float32
    ),
)
