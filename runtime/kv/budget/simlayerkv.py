"""SimLayerKV (arXiv:2410.13846): layers that attend to the first and the newest tokens alone keep only these."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from accel.ir.axis import option
from accel.runtime.kv.budget import Base


@dataclass(frozen=True)
class SimLayerKV(Base):
    """A layer is lazy if the last query's attention to the first `sinks` and the newest `recent` tokens, a mean over
    its heads, is above `threshold`. It then keeps `sinks` + `recent` tokens; every other layer keeps all.

    The score says which: `streaming-llm` with as many sinks, as in the paper. Its thresholds: 0.65 to 0.9.
    """

    threshold: float = option(0.9, least=0, most=1)
    sinks: int = option(4, least=0)
    recent: int = option(1024, least=1)
    observe: ClassVar[int] = 1  # type: ignore[misc]
    adaptive: ClassVar[bool] = True
    even: ClassVar[bool] = False
    small: ClassVar[Mapping[str, Any]] = {"sinks": 2, "recent": 6, "threshold": 0.3}

    def tokens(self, seen: int, layer: int, layers: int) -> int:
        return max(1, min(seen, self.sinks + self.recent))

    def most(self, tokens: int, heads: int) -> int:
        return 1 << 40

    def heads(  # type: ignore[override]
        self,
        keep: Any,
        queries: Any,
        query_positions: Any,
        positions: Any,
        seen: Any,
        attends: Any,
    ) -> Any:
        """See Base."""
        there = positions >= 0
        weights = attends(queries[:, :, -1:], query_positions[:, -1:])[:, :, :, 0]  # [B,G,R,S]
        near = (positions < self.sinks) | (positions >= (seen - self.recent)[:, None, None])
        far = weights.masked_fill(near[:, :, None], 0).sum(-1)  # a sink is none of it
        lazy = ((1 - far).flatten(1).mean(1) > self.threshold)[:, None]
        few = keep[:, None].expand(-1, positions.shape[1])
        return few.where(lazy, there.sum(2))
