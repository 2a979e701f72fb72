"""The same budget for every layer and head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from accel.ir.axis import option
from accel.runtime.kv.budget import Base
from accel.runtime.kv.budget._share import Share


@dataclass(frozen=True)
class Uniform(Share, Base):
    """Keeps `tokens_kept` tokens per row, or, with `compression_ratio` r, the fraction 1 - r of its tokens; the first
    `dense_layers` layers keep every token.
    """

    dense_layers: int = option(0, least=0)
    small: ClassVar[Mapping[str, Any]] = {"tokens_kept": 17}

    def tokens(self, seen: int, layer: int, layers: int) -> int:
        return max(seen, 1) if layer < self.dense_layers else self.average(seen)
