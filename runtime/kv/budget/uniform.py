"""The same budget for every layer and head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from accel.ir.errors import RecipeError
from accel.runtime.kv.budget import Base
from accel.runtime.kv.budget._share import Share


@dataclass(frozen=True)
class Uniform(Share, Base):
    """Keeps `tokens_kept` tokens per row, or, with `compression_ratio` r, the fraction 1 - r of its tokens; the first
    `dense_layers` layers keep every token.
    """

    dense_layers: int = 0
    small: ClassVar[Mapping[str, Any]] = {"tokens_kept": 17}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dense_layers < 0:
            raise RecipeError(f"kv.budget: dense_layers is {self.dense_layers}; give 0 or more")

    def tokens(self, seen: int, layer: int, layers: int) -> int:
        return max(seen, 1) if layer < self.dense_layers else self.average(seen)
