"""Positional Integrity Encoding (arXiv:2407.03157): keys after an edit are rotated, not recomputed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from accel.ir.invariants import Invariant
from accel.runtime.kv.reuse import Base


@dataclass(frozen=True)
class Pie(Base):
    """`session.edit` replaces tokens: keys after them are rotated to their new positions, values are unchanged."""

    relies = Base.relies | {
        Invariant.ALL_LAYERS_RUN,
        Invariant.ALL_TOKENS_HELD,
        Invariant.CALL_INDEPENDENT,
        Invariant.PLAIN_KEYS,
        Invariant.TOKENS_CONTIGUOUS,
    }
    breaks = frozenset({Invariant.BATCH_INVARIANCE})
    grade = "approximate"

    def steps(self) -> list[Any]:
        from accel.passes.kv._shared.shift import Shift

        return [Shift()]
