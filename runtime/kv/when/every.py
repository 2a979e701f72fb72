"""Every `tokens` tokens, in the prompt and in decoding: the cache size stays bounded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from accel.ir.axis import option
from accel.runtime.kv.when import Base


@dataclass(frozen=True)
class Every(Base):
    """After a call the cache holds at most `tokens` more than the budget."""

    tokens: int = option(128, least=1)
    small: ClassVar[Mapping[str, Any]] = {"tokens": 5}

    def due(self, moment: str, recent: int) -> bool:
        return moment != "prompt" and recent >= self.tokens
