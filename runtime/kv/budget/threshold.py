"""The rule of DMS (arXiv:2506.05345), as KVzap (arXiv:2601.07891) uses it: tokens stay whose score is high enough."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from accel.ir.axis import option
from accel.runtime.kv.budget import Base


@dataclass(frozen=True)
class Threshold(Base):
    """Each head keeps the tokens whose score is `threshold` or more, and those that its score protects (`recent`). So
    how many tokens stay depends on the text, and heads and layers keep unequal numbers; -3e38 keeps all.

    A score must mean the same in every text, as `threshold-evict`'s does, or the ranks of `lagkv` with `freezes`; norms
    and attention of a few queries do not.
    """

    threshold: float = option(-3.0, most=1e30)
    adaptive: ClassVar[bool] = True
    even: ClassVar[bool] = False
    level: ClassVar[bool] = False
    small: ClassVar[Mapping[str, Any]] = {"threshold": 0.0}

    def tokens(self, seen: int, layer: int, layers: int) -> int:
        return 1

    def most(self, tokens: int, heads: int) -> int:
        return 1 << 40

    def heads(self, scores: Any, positions: Any) -> Any:
        """See Base."""
        stays = (scores >= self.threshold) & (positions >= 0)
        return stays.sum(2).clamp(min=1)
