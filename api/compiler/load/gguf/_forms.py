"""ggml's blocks of scales times whole numbers, as codes. Bytes [N,B] of a matrix of N rows.

The layouts: github.com/ggml-org/llama.cpp/blob/master/ggml/src/ggml-common.h.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from accel.ir.codes import Levels

Scales = Tensor | Levels


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
    read: Callable[[Tensor], tuple[Tensor, Scales] | tuple[Tensor, Scales, Scales]]


def float16(part: Tensor) -> Tensor:
    """Two bytes [N,B,2] -> [N,B,1]."""
    return part.contiguous().view(torch.float16)


def half(part: Tensor) -> Tensor:
    """The same as float32."""
    return float16(part).float()


def split(part: Tensor, width: int, bits: int) -> Tensor:
    """Bytes [N,B,n] in runs of `width`: first the lowest bits of a run, then the next, … -> [N,B,·]."""
    runs = part.unflatten(2, (-1, 1, width))
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8).view(-1, 1)
    parts: Tensor = (runs >> shifts) & (2**bits - 1)
    return parts.flatten(2)


def _q4_0(b: Tensor) -> tuple[Tensor, Tensor]:
    return split(b[..., 2:], 16, 4), half(b[..., :2])


def _q4_1(b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return split(b[..., 4:], 16, 4), half(b[..., :2]), half(b[..., 2:4])


def _five(high: Tensor, low: Tensor) -> Tensor:
    """Codes of 5 bits, the highest of which lie one after the other."""
    bits = (high.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8)).flatten(2) & 1
    return split(low, 16, 4) | bits << 4


def _q5_0(b: Tensor) -> tuple[Tensor, Tensor]:
    return _five(b[..., 2:6], b[..., 6:]), half(b[..., :2])


def _q5_1(b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return _five(b[..., 4:8], b[..., 8:]), half(b[..., :2]), half(b[..., 2:4])


def _q8_0(b: Tensor) -> tuple[Tensor, Tensor]:
    return b[..., 2:] ^ 128, half(b[..., :2])


def _long(b: Tensor) -> tuple[Levels, Levels]:
    """Scales and offsets [N,B,8] of Q4_K and Q5_K: 6 bits of each, and two factors of all."""
    s = b[..., 4:16]
    first, second, both = s[..., :4], s[..., 4:8], s[..., 8:]
    scales = torch.cat([first & 63, both & 15 | first >> 2 & 48], -1)
    least = torch.cat([second & 63, both >> 4 | second >> 2 & 48], -1)
    return Levels(float16(b[..., :2]), scales), Levels(-float16(b[..., 2:4]), least)


def _q2_k(b: Tensor) -> tuple[Tensor, Levels, Levels]:
    scales, least = b[..., :16] & 15, b[..., :16] >> 4
    return (
        split(b[..., 16:80], 32, 2),
        Levels(float16(b[..., 80:82]), scales),
        Levels(-float16(b[..., 82:]), least),
    )


def _q4_k(b: Tensor) -> tuple[Tensor, Levels, Levels]:
    return split(b[..., 16:], 32, 4), *_long(b)


def _q5_k(b: Tensor) -> tuple[Tensor, Levels, Levels]:
    return split(b[..., 48:], 32, 4) | split(b[..., 16:48], 32, 1) << 4, *_long(b)


def _q3_k(b: Tensor) -> tuple[Tensor, Levels]:
    q = split(b[..., 32:96], 32, 2) | split(b[..., :32], 32, 1) << 2
    scales = split(b[..., 96:104], 8, 4) | split(b[..., 104:108], 4, 2) << 4
    return q, Levels(float16(b[..., 108:]), scales.to(torch.int8) - 32)


def _q6_k(b: Tensor) -> tuple[Tensor, Levels]:
    q = split(b[..., :128], 64, 4) | split(b[..., 128:192], 32, 2) << 4
    return q, Levels(float16(b[..., 208:]), b[..., 192:208].view(torch.int8))


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
