"""ZipCache's saliency (arXiv:2405.14256): the mean attention that a few probe queries pay to a token, over those that
may see it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from accel.ir.axis import option
from accel.passes.kv.inputs._accumulated import Draw
from accel.passes.kv.inputs.attends import Attends
from accel.passes.kv.score import Base

_STEP = 61  # from block to block, a probe's place goes on by so many


@dataclass(frozen=True)
class ZipCache(Base):
    """Probes are the last `window` queries, and one of each `stride` queries in a row; 1 makes all queries probes. The
    sum over a group's heads is divided by the number of probes at or behind the token, so that first tokens, which all
    queries see, are not favoured. `recent`: number of newest tokens that stay.

    The paper takes the newest 5 % of a prompt instead of a fixed number, and before them as many at random. Here their
    places in blocks of `stride` go by the block and `seed`, so that how many are behind a token is known without them.
    """

    window: int = option(32, least=1, most=1024)
    stride: int = option(20, least=1)
    recent: int = option(0, least=0)
    seed: int = option(0, least=0)
    when: ClassVar[str] = "generated"
    small: ClassVar[Mapping[str, Any]] = {"window": 4, "stride": 3}

    @property
    def observe(self) -> int:  # type: ignore[override]
        return self.window

    def _ahead(self, positions: Tensor) -> Tensor:
        """How far it is from a position to the probe of its block; 0: it is one."""
        block = positions.div(self.stride, rounding_mode="floor")
        return block * self.stride + (block * _STEP + self.seed) % self.stride - positions

    def _before(self, positions: Tensor) -> Tensor:
        """Probes by place before a position."""
        return positions.div(self.stride, rounding_mode="floor") + (self._ahead(positions) < 0)

    def _late(self, query_positions: Tensor) -> Tensor:
        """Which queries are no probes by place [B,W]."""
        return (query_positions >= 0) & (self._ahead(query_positions) != 0)

    def accumulate(self, mass: Tensor, drawn: Draw, query_positions: Tensor) -> Tensor:  # type: ignore[override]
        """See Base."""
        return mass + drawn((self._ahead(query_positions) == 0).float())

    def __call__(
        self,
        mass: Tensor,
        queries: Tensor,
        query_positions: Tensor,
        positions: Tensor,
        seen: Tensor,
        attends: Attends,
    ) -> Tensor:
        queries, query_positions = (
            queries[:, :, -self.window :],
            query_positions[:, -self.window :],
        )
        late = self._late(query_positions).float()[:, None, None]  # [B,1,1,W]
        probs = attends(queries, query_positions)  # [B,G,R,W,S]
        total = mass + (late[:, :, None] @ probs)[:, :, :, 0].sum(2)
        sees = query_positions[:, None, None] >= positions[..., None]  # [B,G,S,W]
        random = (self._before(seen)[:, None, None] - self._before(positions)).clamp(min=0)
        return total / ((sees * late).sum(3) + random).clamp(min=1)
