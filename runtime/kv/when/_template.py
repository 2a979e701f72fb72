"""NAME (paper, arXiv): what it does, in a sentence."""

from __future__ import annotations

from dataclasses import dataclass

from accel.runtime.kv.when import Base


@dataclass(frozen=True)
class Template(Base):
    """When the cache is compressed: here, once a prompt is whole."""

    def due(self, moment: str, recent: int) -> bool:
        return moment == "prompt"
