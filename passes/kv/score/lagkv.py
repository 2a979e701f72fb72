"""LagKV (arXiv:2504.04704): keep tokens whose keys and values vary most on the scale of the tokens after them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from accel.ir.axis import option
from accel.passes.kv._shared.slots import places
from accel.passes.kv.score import Base

_TINY = 1e-12  # a range of 0


@dataclass(frozen=True)
class LagKV(Base):
    """After the first `sinks` tokens, partitions of `partition` tokens. Each channel is scaled to the range that it has
    in the next partition; a token's score is the mean, over key and value, of the softmax over the partition of the
    standard deviation of its channels. Tokens are compared by their rank in their partition, or, with `across`, by
    their score. The last complete partition and what follows are kept.

    As kvpress has it, partitions are counted anew at each eviction. With `freezes`, as in the paper's code (whose
    defaults are 16 sinks and partitions of 1024), they lie where they lay in the text, and one that has lost a token
    stays as it is. Then `kv.budget.threshold` = 1 - r keeps the share r of each partition, and evicting on the way
    (`kv.when.every`) keeps what evicting once does. A budget of a fixed number takes whole new partitions instead.
    """

    sinks: int = option(4, least=0)
    partition: int = option(128, least=2, most=1 << 16)
    across: bool = False
    freezes: bool = False
    small: ClassVar[Mapping[str, Any]] = {"sinks": 1, "partition": 3}
    others: ClassVar[tuple[Mapping[str, Any], ...]] = ({"freezes": True},)

    def __call__(self, keys: Tensor, values: Tensor, positions: Tensor) -> Tensor:
        size = self.partition
        parts = (positions.shape[2] + size - 1) // size + 1  # there is always a next one
        after = self._open(positions) if self.freezes else places(positions) - self.sinks
        total = after.masked_fill(positions < 0, -1).amax(2)[..., None, None] + 1
        number = positions.new_ones(parts).cumsum(0)[:, None] - 1  # [P,1]
        counted = (number + 2) * size <= total  # whose next partition is complete [B,G,P,1]
        inside = (positions >= 0) & (after >= 0)
        where = torch.where(inside, after, parts * size)[..., None]  # [B,G,S,1]
        scores = []
        for x in (keys.float(), values.float()):
            blank = torch.zeros_like(x[:, :, :1]).expand(-1, -1, parts * size + 1, -1)
            laid = blank.scatter(2, where.expand_as(x), x)[:, :, :-1].unflatten(2, (parts, size))
            scores.append(_varies(laid))  # [B,G,P,L]
        score = (scores[0] + scores[1]) / 2
        lost = ~score.isfinite()
        if not self.across:
            ranks = score.masked_fill(lost, -1).sort(3).indices.sort(3).indices
            score = ranks / size
        score = score.masked_fill(lost, float("nan")).where(counted, 1.0).flatten(2)
        found = pad(score, (0, 1), value=1.0).gather(2, where[..., 0])
        bad = ~(keys.float().sum(-1) + values.float().sum(-1)).isfinite()
        return found.masked_fill(bad, float("nan"))

    def _open(self, positions: Tensor) -> Tensor:
        """Where each slot lies behind the start of the first partition that is not frozen: below 0, it stays. [B,G,S]

        From there on no token is missing.
        """
        last = positions.amax(2, keepdim=True)
        whole = (positions >= 0) & (last - positions == _behind(positions))
        first = torch.where(whole, positions, last).amin(2, keepdim=True) - self.sinks
        start = (first.clamp(min=0) + self.partition - 1).div(
            self.partition, rounding_mode="floor"
        ) * self.partition
        return positions - self.sinks - start


def _behind(positions: Tensor) -> Tensor:
    """How many tokens of its head come after each slot's [B,G,S]."""
    real = (positions >= 0).long()
    return real.sum(2, keepdim=True) - real.cumsum(2)


def _varies(x: Tensor) -> Tensor:
    """Partitions [B,G,P,L,D] -> the softmax over each of the standard deviations of its tokens [B,G,P,L]."""
    fine, far = x.isfinite(), torch.finfo(x.dtype).max
    low = torch.where(fine, x, far).amin(3, keepdim=True)
    high = torch.where(fine, x, -far).amax(3, keepdim=True)
    low, high = (pad(bound[:, :, 1:], (0, 0, 0, 0, 0, 1)) for bound in (low, high))
    scaled = (x - low) / (high - low).clamp(min=_TINY)
    spread = scaled.std(-1)
    there = spread.isfinite()
    return spread.masked_fill(~there, -far).softmax(-1).masked_fill(~there, float("nan"))
