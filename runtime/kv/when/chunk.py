"""Between the parts of a long prompt, and at its end: the prompt never lies in the cache as a whole."""

from __future__ import annotations

from dataclasses import dataclass

from accel.runtime.kv.when import Base


@dataclass(frozen=True)
class Chunk(Base):
    """A call is cut into parts of 512 tokens. Later parts see what was kept of earlier ones."""

    def due(self, moment: str, recent: int) -> bool:
        return moment in ("part", "prompt")
