"""KVCrush (arXiv:2503.00022): a share of the budget goes to tokens that stand for those that go."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from accel.ir.axis import option
from accel.ir.ops.noise import uniform
from accel.passes.kv._shared.slots import ranks_of, same_token
from accel.passes.kv.refine import Base

_ANCHORS = ("zeros", "ones", "alternate", "random", "mean")


@dataclass(frozen=True)
class KVCrush(Base):
    """`share` of the tokens that a head keeps are representatives; the others are the best by score. A token has a
    bit per head: whether its score is in the upper half of the head's. Tokens that are not among the best are sorted
    by the Hamming distance of their bits to an `anchor` (zeros, ones, alternate, random, or mean: the bits that more
    than half of them have), then by position; representatives are taken at even distances.

    A head has the bits of others for tokens that they hold in the same slot: all, unless heads kept tokens of their
    own.
    """

    share: float = option(0.25, least=0, most=1)
    anchor: str = option("mean", one_of=_ANCHORS)
    seed: int = option(0, least=0)
    small: ClassVar[Mapping[str, Any]] = {"share": 0.4}

    def __call__(
        self, scores: Tensor, positions: Tensor, protected: Tensor, counts: Tensor
    ) -> Tensor:
        real = positions >= 0
        may = real & ~protected
        lowest = scores.masked_fill(~real, -3e38)
        ranks = ranks_of(lowest.masked_fill(protected, 3e38))  # [B,G,S]
        kept = counts[..., None]
        few = (kept * self.share).long()
        goes = may & (ranks >= kept - few)
        upper = ranks_of(scores.masked_fill(~may, -3e38)) * 2 < may.sum(2, keepdim=True)
        far = self._distances(upper & may, goes, positions)
        slot = torch.ones_like(positions).cumsum(2)
        order = (far * (slot.amax(2, keepdim=True) + 1) + slot).masked_fill(~goes, 1 << 40)
        place = order.sort(-1).indices.sort(-1).indices
        stands = goes & (place * few % goes.sum(2, keepdim=True).clamp(min=1) < few)
        share = ranks / (ranks.amax(2, keepdim=True) + 1)  # below 1
        best = torch.where(ranks < kept - few, 2.0, stands.to(scores.dtype))
        return best + 1 - share

    def _distances(self, bits: Tensor, goes: Tensor, positions: Tensor) -> Tensor:
        """Bits [B,G,S] -> how many of a token's differ from the anchor's [B,G,S]."""
        head = torch.ones_like(positions[:, :, :1]).cumsum(1) - 1
        if self.anchor == "mean":
            anchor = (bits & goes).sum(2, keepdim=True) * 2 > goes.sum(2, keepdim=True)
        else:
            anchor = {
                "zeros": head < 0,
                "ones": head >= 0,
                "alternate": head % 2 == 1,
                "random": uniform(self.seed, head) < 0.5,
            }[self.anchor]
        return ((bits != anchor)[:, None] & same_token(positions)).sum(2)
