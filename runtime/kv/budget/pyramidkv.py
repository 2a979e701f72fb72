"""PyramidKV (arXiv:2406.02069): lower layers keep more tokens, because attention is broader there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from accel.ir.axis import option
from accel.runtime.kv.budget import Base
from accel.runtime.kv.budget._share import Share


@dataclass(frozen=True)
class PyramidKV(Share, Base):
    """`beta`: steepness; `window`: tokens that every layer keeps in addition, as in the score.

    As kvpress' PyramidKVPress: if the smallest budget is below `window` tokens, all layers get the same.
    """

    beta: float = option(20.0, least=1)
    window: int = option(32, least=0)
    small: ClassVar[Mapping[str, Any]] = {"tokens_kept": 17, "beta": 4.0, "window": 4}

    def tokens(self, seen: int, layer: int, layers: int) -> int:
        mean = self.mean(seen)
        if mean >= seen or layers == 1:
            return max(1, round(mean))
        least = mean / self.beta
        most = 2 * mean - least
        if most >= seen - self.window:
            most = seen - self.window
            least = 2 * mean - most
        if not seen >= most >= least >= self.window:
            return max(1, round(mean))
        return max(1, round(most - layer * (most - least) / (layers - 1)))
