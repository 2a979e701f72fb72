"""After the prompt: its last token still attended to all tokens."""

from __future__ import annotations

from dataclasses import dataclass

from accel.runtime.kv.when import Base


@dataclass(frozen=True)
class Prompt(Base):
    """Generated tokens are not evicted."""

    def due(self, moment: str, recent: int) -> bool:
        return moment == "prompt"
