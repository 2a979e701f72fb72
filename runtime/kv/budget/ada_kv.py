"""Ada-KV (arXiv:2407.11550): the heads of a layer share its budget according to their scores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from accel.ir.axis import option
from accel.runtime.kv.budget import EMPTY, Base
from accel.runtime.kv.budget._ranks import ranks
from accel.runtime.kv.budget._share import Share


@dataclass(frozen=True)
class AdaKV(Share, Base):
    """`safeguard`: fraction of the mean budget that every head keeps. As kvpress' AdaKVPress: these tokens
    are kept first, then
    the highest-scoring tokens of all heads. Scores must be comparable across heads, as attention is and norms are not.
    """

    safeguard: float = option(0.2, least=0, most=1)
    even: ClassVar[bool] = False
    level: ClassVar[bool] = False
    small: ClassVar[Mapping[str, Any]] = {"tokens_kept": 17}

    def tokens(self, seen: int, layer: int, layers: int) -> int:
        return self.average(seen)

    def most(self, tokens: int, heads: int) -> int:
        return heads * tokens - (heads - 1) * self._safe(tokens)

    def room(self, tokens: int, heads: int, slots: int) -> int:
        """See Base."""
        return heads * min(tokens, slots)

    def heads(self, scores: Any, keep: Any, positions: Any) -> Any:  # type: ignore[override]
        safe = (keep * self.safeguard).long().clamp(min=int(self.safeguard > 0))
        best = (ranks(scores, positions) < safe[:, None, None]) & (scores > EMPTY)  # [B,G,S]
        forced = scores.masked_fill(best, float("inf"))
        among = ranks(forced.flatten(1), positions.flatten(1))  # [B,G S]
        stays = among < (keep * scores.shape[1])[:, None]
        return stays.unflatten(1, (scores.shape[1], scores.shape[2])).sum(2)

    def _safe(self, tokens: int) -> int:
        return max(int(self.safeguard > 0), int(tokens * self.safeguard))
