"""NAME (paper, arXiv): what it does, in a sentence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from accel.runtime.kv.reuse import Base


@dataclass(frozen=True)
class Template(Base):
    """What a session reuses: here, the keys after an edit, which move to their new positions."""

    grade = "approximate"

    def steps(self) -> list[Any]:
        from accel.passes.kv._shared.shift import Shift

        return [Shift()]
