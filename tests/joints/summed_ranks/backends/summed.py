"""A backend of backends: each rank computes a part of the logits, which are their sum."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from accel.runtime.backends.protocol import Backend, BackendSession
from accel.runtime.call import Outputs


class Summed:
    """Ranks in this process. What a session asks of a backend, all of them do; the first one answers."""

    def __init__(self, ranks: Sequence[Backend]):
        self._ranks = ranks

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ranks[0], name)

    def open_session(self, batch: int) -> SummedSession:
        return SummedSession([rank.open_session(batch) for rank in self._ranks])


class SummedSession:
    def __init__(self, ranks: Sequence[BackendSession]):
        self._ranks = ranks

    def __getattr__(self, name: str) -> Any:
        found = [getattr(rank, name) for rank in self._ranks]
        if not callable(found[0]):
            return found[0]
        return lambda *args, **options: [each(*args, **options) for each in found][0]

    def step(self, *args: Any, **options: Any) -> Outputs:
        parts = [rank.step(*args, **options) for rank in self._ranks]
        return Outputs(np.sum([part.logits for part in parts], axis=0), parts[0].extra)

    def copy(self, rows: Any = None) -> SummedSession:
        return SummedSession([rank.copy(rows) for rank in self._ranks])

    def join(self, other: SummedSession) -> None:
        for mine, its in zip(self._ranks, other._ranks, strict=True):
            mine.join(its)
