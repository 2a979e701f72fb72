"""ChunkKV (arXiv:2502.00299): chunks of neighbouring tokens stay or go together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor
from torch.nn.functional import pad

from accel.ir.axis import option
from accel.passes.kv._shared.slots import in_order, mean_of_heads, places, sums
from accel.passes.kv.refine import Base
from accel.passes.kv.refine._ranks import above_zero


@dataclass(frozen=True)
class ChunkKV(Base):
    """A chunk is the tokens of `chunk` consecutive positions. Its score is the `pooling` (sum or mean) of those of its
    tokens, means over the heads of the layer, so all heads keep the same chunks. The last chunk that is kept is cut
    to the budget. Protected tokens do not count.

    Of every `reuse` layers the first chooses, and the others keep the same tokens (the paper: 2).

    The paper sums; kvpress takes the mean and chunks of 20. Scores below 0 are counted from the lowest.
    """

    chunk: int = option(10, least=1, most=4096)
    pooling: str = option("sum", one_of=("sum", "mean"))
    reuse: int = option(1, least=1, most=1 << 20)  # type: ignore[misc]
    small: ClassVar[Mapping[str, Any]] = {"chunk": 3}

    def __call__(self, scores: Tensor, positions: Tensor, protected: Tensor) -> Tensor:
        worth = mean_of_heads(above_zero(scores), positions)
        counts = (positions >= 0) & ~protected
        chunk = self._chunks(positions)
        total = sums(worth.masked_fill(~counts, 0), chunk)
        if self.pooling == "sum":
            return total
        return total / sums(counts.to(total.dtype), chunk).clamp(min=1)

    def _chunks(self, positions: Tensor) -> Tensor:
        """The number of each slot's chunk among those of its head."""
        place = places(positions)
        chunk = in_order(positions // self.chunk, place)
        starts = (chunk != pad(chunk, (1, 0))[..., :-1]).long().cumsum(2)
        return pad(starts, (0, 1)).gather(2, place).where(positions >= 0, place)
