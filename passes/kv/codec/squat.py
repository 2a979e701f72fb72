"""SQuat (arXiv:2503.24358): keys are rounded so that what is lost lies across the directions that queries take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor

from accel.ir.axis import option
from accel.passes.kv.codec import At, Storage
from accel.passes.kv.codec._directions import largest
from accel.passes.kv.codec._groups import Groups
from accel.passes.kv.codec.kivi import Kivi


@dataclass(frozen=True)
class SQuat(Kivi):
    """`kivi`, but channels of keys are rounded `channels` at a time, and the error of each is taken off those to come,
    so that the sum of the squares of the error and, `weight` (lambda) times, of its products with the queries is least.
    Of the queries only the `directions` count that they are largest in, after RoPE. 0 of `weight`: `kivi`.

    The queries are all those that the row has had when a block is encoded; the paper takes the prompt's, once.
    """

    weight: float = option(0.001, least=0)
    directions: int = option(5, least=1, most=16)
    channels: int = option(32, least=1, most=1024)
    key: ClassVar[str] = "squat"
    others: ClassVar[tuple[Mapping[str, Any], ...]] = (
        {"bits": 4, "channels": 8},
        {"weight": 0.0, "group": 8, "residual": 24},
    )

    @property
    def storage(self) -> Storage:
        return replace(super().storage, queries=True)

    def encode(self, at: At, x: Tensor) -> dict[str, Tensor]:
        return super().encode(at, self._shifted(x, at.context.get("queries"), None))

    def within(self, at: At, x: Tensor, back: Tensor) -> Tensor:
        """No number is off by more than half a step of its group from what it became by the errors before it."""
        return super().within(at, self._shifted(x, at.context.get("queries"), back), back)

    def _shifted(self, x: Tensor, queries: Tensor | None, back: Tensor | None) -> Tensor:
        """Keys [B,G,P,R,D] as they are rounded: less what the errors of channels before them push into them. queries:
        their products [B,G,D,D]; None, of values: x. back: what was read of them; None: what rounding gives.
        """
        if queries is None:
            return x
        width = int(x.shape[-1])
        cuts = [*range(0, width, self.channels), width]
        found = list(x.split(self.channels, -1))
        if len(found) == 1:
            return x
        basis = _subspace(queries, min(self.directions, width)) * self.weight**0.5
        for i, (first, last) in enumerate(pairwise(cuts[:-1])):
            known = None if back is None else back[..., first:last]
            lost = (self._read(found[i]) if known is None else known) - found[i]
            pushed = lost @ _passed(basis, first, last)[:, :, None]
            after = pushed.split(self.channels, -1)
            found[i + 1 :] = [a - b for a, b in zip(found[i + 1 :], after, strict=True)]
        return torch.cat(found, -1)

    def _read(self, x: Tensor) -> Tensor:
        """Channels of keys as they are read back."""
        groups = Groups.by_role("k", self.bits, self.group, self.residual)
        return groups.blocks(groups.encode(x), int(x.shape[-1]))


def _subspace(products: Tensor, count: int) -> Tensor:
    """W [B,G,D,r]: W Wᵀ is the part of the queries' products [B,G,D,D] in the r directions that it is largest in."""
    columns = largest(products, count)
    size = (columns * (products @ columns)).sum(-2, keepdim=True)  # of each direction
    return columns * size.clamp(min=0).sqrt()


def _passed(basis: Tensor, first: int, last: int) -> Tensor:
    """[B,G,c,D-last]: how an error of the channels first..last moves those behind them, with A = I + W Wᵀ: the
    transpose of A_RR⁻¹ A_Ri, which is W_i (I + W_Rᵀ W_R)⁻¹ W_Rᵀ. basis: W [B,G,D,r], the longest column first. The
    r rows are eliminated one by one, so that a direction that is much larger than the others is exact.
    """
    behind, own = basis[..., last:, :], basis[..., first:last, :]
    count = basis.shape[-1]
    gram = torch.eye(count, device=basis.device) + behind.mT @ behind
    rows = torch.cat((gram, behind.mT), -1)
    for i in range(count):
        one = rows[..., i : i + 1, :] / rows[..., i : i + 1, i : i + 1]
        others = rows - rows[..., i : i + 1] * one
        rows = torch.cat((others[..., :i, :], one, others[..., i + 1 :, :]), -2)
    found: Tensor = own @ rows[..., count:]
    return found
