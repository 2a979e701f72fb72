"""GEAR (arXiv:2403.05527): quantised blocks of tokens, the outliers beside them, and what rounding lost in low rank."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from accel.ir.axis import option
from accel.ir.ops.patched import add_product, put_numbers
from accel.passes.kv.codec import At, Layout
from accel.passes.kv.codec._directions import any_columns, orthonormal
from accel.passes.kv.codec.kivi import Kivi

_LOOPS = 3  # of the power iteration, as in the paper's release


@dataclass(frozen=True)
class Gear(Kivi):
    """A block of R = `residual` tokens of a head, x [R,D], is D̂ + A Bᵀ, and at its outliers what it was.

    `bits`, `group`, `residual`: D̂, as in `kivi`: keys in groups of tokens of a channel, values in groups of channels of
    a token. `outliers`: the share of each channel of keys, and of each token's values, that is kept in float16 with its
    place, half of it the largest and half the smallest numbers; D̂ has the mean of the others there. `low_rank`: r of
    A [R,r] and B [D,r], float16, of what D̂ lost, by three steps of a power iteration; 0: none.

    The paper's values have their outliers among all heads, here each head has as many; and its prompt is one block of
    rank 4, here a prompt is blocks of `residual` tokens, each with its own A and B. `outliers = 0` is GEAR-L.
    """

    group: int = 64
    residual: int = option(64, least=1, most=8192, multiple_of="group")
    low_rank: int = option(2, least=0, most=16)
    outliers: float = option(0.02, least=0, most=1)
    key: ClassVar[str] = "gear"
    small: ClassVar[Mapping[str, Any]] = {"group": 4, "residual": 8}
    others: ClassVar[tuple[Mapping[str, Any], ...]] = (
        {"bits": 4, "outliers": 0.0},
        {"bits": 8, "group": 8, "residual": 24, "low_rank": 4, "outliers": 0.25},
    )

    def _rank(self, at: At) -> int:
        return min(self.low_rank, self.residual, at.width)

    def _ends(self, at: At) -> tuple[int, int]:
        """Lines that have outliers (channels of keys, tokens of values), and how many at either end of one."""
        lines, size = (at.width, self.residual) if at.role == "k" else (self.residual, at.width)
        return lines, min(round(self.outliers * size / 2), size // 2)

    def parts(self, at: At) -> Layout:
        found = super().parts(at)
        lines, ends = self._ends(at)
        if ends:
            line = self.residual if at.role == "k" else at.width
            found["outlier"] = ("float16", (2 * ends * lines,))
            found["place"] = ("uint8" if line <= 256 else "int64", (2 * ends * lines,))
        if rank := self._rank(at):
            found["a"] = ("float16", (self.residual * rank,))
            found["b"] = ("float16", (at.width * rank,))
        return found

    def encode(self, at: At, x: Tensor) -> dict[str, Tensor]:
        parts, rest, stays = dict[str, Tensor](), x, None
        ends, rank = self._ends(at)[1], self._rank(at)
        if ends or rank:
            x = x + (x.half().float() * 0).sum(
                (-2, -1), keepdim=True
            )  # no number: none of its block
            rest = x
        if ends:
            lines = x.mT if at.role == "k" else x
            stays, place = _ends(lines.nan_to_num(nan=0.0), ends)
            parts["outlier"] = lines.gather(-1, place).half().flatten(-2)
            parts["place"] = place.to(_place(lines)).flatten(-2)
            others = torch.where(stays, 0, lines).sum(-1, keepdim=True)
            mean = others / max(1, int(lines.shape[-1]) - 2 * ends)
            rest = torch.where(stays, mean, lines)
            rest, stays = (rest.mT, stays.mT) if at.role == "k" else (rest, stays)
        found = {**super().encode(at, rest), **parts}
        if rank:
            lost = x - self._groups(at).blocks(found, at.width)
            lost = lost if stays is None else torch.where(stays, 0, lost)
            heads = lost.shape[:2]
            for name, y in zip("ab", _low_rank(lost.flatten(0, 1), rank), strict=True):
                found[name] = y.half().flatten(2).unflatten(0, heads)
        return found

    def decode(self, at: At, parts: Mapping[str, Tensor]) -> Tensor:
        back = super().decode(at, parts)
        if self._rank(at):
            back = add_product(back, parts["a"], parts["b"], self.residual)
        if self._ends(at)[1]:
            outliers, along = (parts["outlier"], parts["place"]), self._groups(at).along
            back = put_numbers(back, *outliers, self.residual, along)
        return back

    def within(self, at: At, x: Tensor, back: Tensor) -> Tensor:
        """No block is further off (root of squares) than rounding alone leaves it, and outliers are as they were, but
        for what is float16. bool, one for each block.
        """
        ends, size = self._ends(at)[1], x.abs() * 2**-10 + 1e-7
        off, right = (back - x).abs(), torch.ones(x.shape[:-2], dtype=torch.bool)
        lost = (self._groups(at).blocks(self.encode(at, x), at.width) - x).abs()
        if ends:
            stays = _ends(x.mT, ends)[0].mT if at.role == "k" else _ends(x, ends)[0]
            right = ((off <= size) | ~stays).flatten(-2).all(-1)
            lost = torch.where(stays, 0, lost)
        near: Tensor = off.flatten(-2).norm(dim=-1) <= (lost + 2 * size).flatten(-2).norm(dim=-1)
        return right & near


def _place(lines: Tensor) -> torch.dtype:
    return torch.uint8 if lines.shape[-1] <= 256 else torch.int64


def _ends(lines: Tensor, ends: int) -> tuple[Tensor, Tensor]:
    """Which of the last axis are its `ends` largest and as many smallest numbers, of equal ones the first, and their
    places [...,2 ends].
    """
    size = lines.shape[-1]
    stays = torch.zeros_like(lines, dtype=torch.bool)
    for side in (lines, -lines):
        free = side.masked_fill(stays, -math.inf)
        least = free.topk(ends, dim=-1).values[..., -1:]
        more, same = free > least, free == least
        room = ends - more.sum(-1, keepdim=True)
        stays = stays | more | (same & (same.cumsum(-1) <= room))
    back = size - torch.arange(size, device=lines.device)
    return stays, size - torch.where(stays, back, 0).topk(2 * ends, dim=-1).values


def _low_rank(x: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """x [N,P,R,D] as A [N,P,R,r] times the transpose of B [N,P,D,r], A orthogonal, its columns of length R^½.

    Columns are made one after another, so those of a smaller rank are the first of a larger one.
    """
    rows, width = x.shape[-2:]
    most = x.abs().amax((-2, -1), keepdim=True).clamp(min=1e-30)
    x = x / most  # squares of what is small are not 0
    right = any_columns(x, rank)
    for step in range(_LOOPS):
        left = orthonormal(x @ right, again=step == _LOOPS - 1)
        right = x.mT @ left
    long = rows**0.5  # so that no number of B is larger than those of x, for float16
    return left * long, right * most / long
