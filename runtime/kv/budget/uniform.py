"""The same for every layer and head."""

from __future__ import annotations

from dataclasses import dataclass

from accel.runtime.kv.budget import Base
from accel.runtime.kv.budget._share import Share


@dataclass(frozen=True)
class Uniform(Share, Base):
    """`tokens_kept` of each row, or all but the share `compression_ratio` of what it has seen."""

    def tokens(self, seen: int, layer: int, layers: int) -> int:
        return self.average(seen)
