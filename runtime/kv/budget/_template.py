"""NAME (paper, arXiv): what it does, in a sentence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from accel.runtime.kv.budget import Base
from accel.runtime.kv.budget._share import Share


@dataclass(frozen=True)
class Template(Share, Base):
    """How many tokens a layer keeps: here, every layer the same number."""

    small: ClassVar[Mapping[str, Any]] = {"tokens_kept": 17}

    def tokens(self, seen: int, layer: int, layers: int) -> int:
        return self.average(seen)
