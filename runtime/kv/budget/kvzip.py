"""KVzip's budget (arXiv:2505.23416): the heads of all layers share one budget according to their scores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from accel.runtime.kv.budget import Base
from accel.runtime.kv.budget._ranks import ranks
from accel.runtime.kv.budget._share import Share


@dataclass(frozen=True)
class KVzip(Share, Base):
    """The highest scores of a row stay, whatever their layer and head. Scores must be comparable across layers, as
    attention is and norms are not.
    """

    even: ClassVar[bool] = False
    level: ClassVar[bool] = False
    small: ClassVar[Mapping[str, Any]] = {"tokens_kept": 17}

    def tokens(self, seen: int, layer: int, layers: int) -> int:
        return self.average(seen)

    def most(self, tokens: int, heads: int) -> int:
        return 1 << 40

    def across(self, scores: Any, keep: Any, positions: Any, heads: int) -> Any:
        """See Base."""
        return ranks(scores, positions) < (keep * heads)[:, None]
