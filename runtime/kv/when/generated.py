"""Once a prompt is whole, and then every `tokens` generated tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from accel.ir.axis import option
from accel.runtime.kv.when import Base


@dataclass(frozen=True)
class Generated(Base):
    """The prompt is never cut before its end. A session that ends no prompt (`end_prompt`) evicts nothing."""

    tokens: int = option(128, least=1)
    small: ClassVar[Mapping[str, Any]] = {"tokens": 2}

    def due(self, moment: str, recent: int) -> bool:
        return moment == "prompt" or (moment == "token" and recent >= self.tokens)
