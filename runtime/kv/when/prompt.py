"""Once a prompt is whole: its last token still saw everything."""

from __future__ import annotations

from dataclasses import dataclass

from accel.runtime.kv.when import Base


@dataclass(frozen=True)
class Prompt(Base):
    """What is generated afterwards stays whole."""

    def due(self, moment: str, recent: int) -> bool:
        return moment == "prompt"
