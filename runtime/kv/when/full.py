"""Each time that the cache is full: of a row, `tokens` tokens are in it, kept ones among them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from accel.ir.axis import option
from accel.runtime.kv.when import Base


@dataclass(frozen=True)
class Full(Base):
    """After a call the cache holds fewer than `tokens` tokens, or the budget. A row is as it is until it was full."""

    tokens: int = option(1024, least=1)
    whole: ClassVar[bool] = True
    small: ClassVar[Mapping[str, Any]] = {"tokens": 18}

    def due(self, moment: str, recent: int) -> bool:
        return moment != "prompt" and recent >= self.tokens
