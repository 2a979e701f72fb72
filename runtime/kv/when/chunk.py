"""After each chunk of a long prompt and at its end: the whole prompt is never in the cache."""

from __future__ import annotations

from dataclasses import dataclass

from accel.runtime.kv.when import Base


@dataclass(frozen=True)
class Chunk(Base):
    """A call is split into chunks of 512 tokens. Later chunks attend to the tokens that were kept of earlier ones."""

    def due(self, moment: str, recent: int) -> bool:
        return moment in ("part", "prompt")
