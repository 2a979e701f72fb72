"""Mustafar (arXiv:2505.22913): of each token's keys and values only the largest numbers stay, wherever they stand."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from accel.ir.axis import option
from accel.ir.ops.groups import packed
from accel.ir.ops.patched import spread_rows
from accel.passes.kv.codec import At, Base, Layout, Storage


@dataclass(frozen=True)
class Mustafar(Base):
    """`sparsity`: the share of a token's D numbers that become 0, the smallest of a head; ceil((1 - sparsity) D) stay,
    in float16, and a bit for each of the D says where. `recent`: at least so many tokens stay whole.
    """

    sparsity: float = option(0.7, least=0, below=1)
    recent: int = option(32, least=1, most=4096)
    error = 4.0  # of random weights, whose numbers are all of a size
    small: ClassVar[Mapping[str, Any]] = {"recent": 8}
    others: ClassVar[tuple[Mapping[str, Any], ...]] = ({"sparsity": 0.5}, {"sparsity": 0.0})

    @property
    def storage(self) -> Storage:
        return Storage(block=self.recent)

    def _stay(self, width: int) -> int:
        return max(1, math.ceil((1 - self.sparsity) * width - 1e-9))

    def parts(self, at: At) -> Layout:
        kept = ("float16", (self.recent * self._stay(at.width),))
        return {"": kept, "mask": ("uint8", (self.recent * -(-at.width // 8),))}

    def encode(self, at: At, x: Tensor) -> dict[str, Tensor]:
        width, stay = at.width, self._stay(at.width)
        size = torch.nan_to_num(x.abs(), nan=torch.inf, posinf=torch.inf)  # what is no number stays
        least = size.topk(stay, dim=-1).values[..., -1:]
        more, same = size > least, size == least  # of equal ones the first
        room = stay - more.sum(-1, keepdim=True)
        stays = more | (same & (same.cumsum(-1) <= room))
        back = width - torch.arange(width, device=x.device)
        first = torch.where(stays, back, 0).topk(stay, dim=-1).values
        return {
            "": x.gather(-1, width - first).half().flatten(-2),
            "mask": packed(stays.long(), 1).flatten(-2),
        }

    def decode(self, at: At, parts: Mapping[str, Tensor]) -> Tensor:
        back: Tensor = spread_rows(parts[""], parts["mask"], self.recent, at.width)
        return back

    def within(self, at: At, x: Tensor, back: Tensor) -> Tensor:
        """What stays is rounded to float16; what does not is no larger than anything that stays."""
        least = x.abs().topk(self._stay(at.width), dim=-1).values[..., -1:]
        near = (back - x).abs() <= x.abs() * 2**-10 + 1e-7
        many = (back != 0).sum(-1, keepdim=True) <= self._stay(at.width)
        return many & (near | ((back == 0) & (x.abs() <= least)))
