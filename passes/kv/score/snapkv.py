"""SnapKV (arXiv:2404.14469): keep the prompt tokens that the last queries of the prompt attend to most."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from accel.ir.axis import option
from accel.passes.kv.inputs.attends import Attends
from accel.passes.kv.score import Base
from accel.passes.kv.score._window import pooled


@dataclass(frozen=True)
class SnapKV(Base):
    """`window`: number of last queries that vote; their tokens are kept. `kernel`: pooling width over
    neighbouring tokens, odd.
    """

    window: int = option(32, least=1, most=1024)
    kernel: int = option(5, least=1, most=63, odd=True)
    pooling: str = option("mean", one_of=("mean", "max"))
    small: ClassVar[Mapping[str, Any]] = {"window": 4, "kernel": 3}

    @property
    def observe(self) -> int:  # type: ignore[override]
        return self.window

    @property
    def recent(self) -> int:  # type: ignore[override]
        return self.window

    def __call__(
        self,
        queries: Tensor,
        query_positions: Tensor,
        positions: Tensor,
        seen: Tensor,
        attends: Attends,
    ) -> Tensor:
        probs = attends(queries, query_positions)  # [B,G,R,W,S]
        prefix = positions < (seen - self.window)[:, None, None]
        count = (query_positions >= 0).sum(1).clamp(min=1)[:, None, None, None]
        scores = probs.sum(3) / count * prefix[:, :, None]
        return pooled(scores, positions, self.kernel, self.pooling).mean(2)
