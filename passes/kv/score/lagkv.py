"""LagKV (arXiv:2504.04704): keep tokens whose keys and values vary most on the scale of the tokens after them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from accel.ir.axis import count
from accel.ir.errors import RecipeError
from accel.passes.kv._shared.slots import places
from accel.passes.kv.score import Base

_TINY = 1e-12  # a range of 0


@dataclass(frozen=True)
class LagKV(Base):
    """After the first `sinks` tokens, partitions of `partition` tokens. Each channel is scaled to the range that it has
    in the next partition; a token's score is the mean, over key and value, of the softmax over the partition of the
    standard deviation of its channels. Tokens are compared by their rank in their partition, or, with `across`, by
    their score. The last complete partition and what follows are kept.

    As kvpress has it: partitions are counted anew at each eviction. The paper's code freezes what it compressed, and
    its defaults are 16 sinks and partitions of 1024.
    """

    sinks: int = 4
    partition: int = count(128, most=1 << 16)
    across: bool = False
    small: ClassVar[Mapping[str, Any]] = {"sinks": 1, "partition": 3}

    def __post_init__(self) -> None:
        if self.sinks < 0 or self.partition < 2:
            raise RecipeError(
                f"kv.score.lagkv: sinks is {self.sinks} and partition {self.partition}; give at least 0 and 2"
            )

    def __call__(self, keys: Tensor, values: Tensor, positions: Tensor) -> Tensor:
        place = places(positions)
        size = self.partition
        parts = (positions.shape[2] + size - 1) // size + 1  # there is always a next one
        total = (positions >= 0).sum(2)[:, :, None, None] - self.sinks  # tokens after the sinks
        number = positions.new_ones(parts).cumsum(0)[:, None] - 1  # [P,1]
        counted = (number + 2) * size <= total  # whose next partition is complete [B,G,P,1]
        after = place - self.sinks
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
