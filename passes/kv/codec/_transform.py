"""Vectors in few bits: more of them for the directions in which they are large, points of a normal distribution, and
one scale a vector.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from accel.ir.ops.codec import look_up_rows
from accel.ir.ops.groups import group_dequantize, packed
from accel.passes.kv.codec._method import Layout

# Where the mean square error of rounding a normal distribution is least (Max 1960): the points above 0.
_ABOVE = {
    1: (0.7979,),
    2: (0.4528, 1.5104),
    4: (0.1284, 0.3881, 0.6568, 0.9424, 1.2562, 1.6181, 2.0690, 2.7326),
}
_PARTS = 8.0  # a scale is float16 in parts of this, so that none of a float16 vector is too large


@dataclass(frozen=True)
class Transform:
    """`rows` tokens of `heads` vectors of `width` numbers, about 0, in `sizes` [G,D] that say how large each number is
    beside the others. `levels`: bits, and how many numbers in a row have them; together `width`.
    """

    heads: int
    width: int
    rows: int
    levels: tuple[tuple[int, int], ...]

    @classmethod
    def falling(cls, heads: int, width: int, rows: int) -> Transform:
        """Twice the bits of two for the first quarter, half of them for the second half: two on average."""
        one = width // 4
        levels = ((4, one), (2, one), (1, width - 2 * one))
        return cls(heads, width, rows, tuple(x for x in levels if x[1]))

    @classmethod
    def level(cls, heads: int, width: int, rows: int) -> Transform:
        """Two bits for each number."""
        return cls(heads, width, rows, ((2, width),))

    def parts(self) -> Layout:
        """Of a block of tokens."""
        each = self.rows * self.heads
        return {
            "": ("uint8", (each * sum(_bytes(bits, n) for bits, n in self.levels),)),
            "scale": ("float16", (each,)),
        }

    def encode(self, x: Tensor, sizes: Tensor) -> dict[str, Tensor]:
        """x [B,1,P,R,G,D] -> its parts [B,1,P,n]."""
        scale = x.norm(dim=-1, keepdim=True) / sizes.norm(dim=-1, keepdim=True)
        y = x / (sizes * scale.clamp(min=1e-30))
        codes, read = list[Tensor](), list[Tensor]()
        for (bits, _), one in zip(self.levels, self._split(y), strict=True):
            points = _points(bits, x)
            code = (one[..., None] > (points[1:] + points[:-1]) / 2).sum(-1)
            codes.append(packed(code, bits))
            read.append(points[code])
        back = torch.cat(read, -1) * sizes
        fitted = (x * back).sum(-1) / back.square().sum(-1)
        return {
            "": torch.cat(codes, -1).flatten(-3),
            "scale": (fitted / _PARTS).half().flatten(-2),
        }

    def decode(self, parts: Mapping[str, Tensor], sizes: Tensor) -> Tensor:
        """Parts [B,1,P,n] -> [B,G,P R,D]."""
        widths = [_bytes(bits, n) for bits, n in self.levels]
        codes = parts[""].unflatten(-1, (-1, sum(widths))).flatten(2, 3)  # [B,1,P R G,bytes]
        step, read = torch.ones_like(codes[..., :1], dtype=torch.float16), list[Tensor]()
        for (bits, n), one in zip(self.levels, codes.split(widths, -1), strict=True):
            code = group_dequantize(one, step, step * 0, bits, n, "channels", 1, n)
            read.append(look_up_rows(code.to(torch.uint8), _points(bits, sizes)))
        scale = parts["scale"].float().flatten(2)[..., None] * _PARTS
        found = (torch.cat(read, -1) * scale)[:, 0].unflatten(1, (-1, self.heads))
        back: Tensor = (found * sizes).transpose(1, 2)
        return back

    def near(self, x: Tensor, back: Tensor, sizes: Tensor, off: Tensor) -> Tensor:
        """Whether what is lost of each vector [..,G,D] lies across what is read of it, so that no other scale loses
        less, and is no more than these points leave; but for float16, and `off` [..,G] of rounding. bool [..,G].
        """
        lost, long = x - back, back.norm(dim=-1)
        across = (lost * back).sum(-1).abs() <= long * (long * 2**-10 + off)
        own = self.decode(self.encode(x, sizes), sizes).transpose(1, 2)
        least = (x - own.unflatten(1, (x.shape[2], x.shape[3]))[:, None]).norm(dim=-1)
        found: Tensor = across & (lost.norm(dim=-1) <= least + x.norm(dim=-1) * 2**-10 + off)
        return found

    def _split(self, x: Tensor) -> tuple[Tensor, ...]:
        found: tuple[Tensor, ...] = x.split([n for _, n in self.levels], -1)
        return found


def _bytes(bits: int, count: int) -> int:
    return -(-count * bits // 8)


def _points(bits: int, like: Tensor) -> Tensor:
    """[2^bits], the least first."""
    above = torch.tensor(_ABOVE[bits], device=like.device)
    return torch.cat((-above.flip(0), above))
