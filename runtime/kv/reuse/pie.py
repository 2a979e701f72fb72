"""Positional Integrity Encoding (Let the Code LLM Edit Itself): what follows an edit is moved, not recomputed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from accel.runtime.kv.reuse import Base

_GONE = "an edit moves every token that follows it, and dropped ones are not there"
_APART = {
    "kv.score": _GONE,
    "kv.budget": _GONE,
    "kv.keep": _GONE,
    "kv.when": _GONE,
    "kv.codec": "keys are rotated as numbers, and codes are none",
    "kv.select": "what is known of pages of keys does not move with them",
    "prefill": "what a session holds of a pruned prompt is not the text that an edit speaks of",
    "depth": "layers that calls left out lack tokens that an edit would move",
    "numerics": "values that follow an edit are those from before it",
}


@dataclass(frozen=True)
class Pie(Base):
    """`session.edit` replaces tokens: keys after them are rotated to their new positions, values stay."""

    grade = "approximate"

    def steps(self) -> list[Any]:
        from accel.passes.kv._shared.shift import Shift

        return [Shift()]

    def apart(self, axis: str, method: Any) -> str:
        found = (why for other, why in _APART.items() if f"{axis}.".startswith(f"{other}."))
        return next(found, "")
