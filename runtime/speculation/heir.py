"""The session of a model that drafts for itself: it begins with the keys and values of the target's session."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from accel.runtime.call import Logits
from accel.runtime.decode.context import Model
from accel.runtime.decode.row import Row
from accel.runtime.inputs.ints import Ints
from accel.runtime.session.session import Session
from accel.runtime.speculation.follow import BACK, Follower


class Heir(Follower):
    """It takes the cache of the target over, but for the newest tokens, whose queries say what is kept, and runs those
    as the end of a prompt. Where the two caches store tokens in different ways, it runs all of them.
    """

    def __init__(self, model: Model, rows: Sequence[Row], target: Session, trees: bool = False):
        super().__init__(model, len(rows), trees)
        self._rows, self._target = rows, target
        kv = model.facts.kv
        self._runs = 1 if kv is None else max(1, kv.observe)  # tokens of a row that it runs itself
        self._copies = kv is None or not (kv.repeats or kv.marks)  # else it goes by whole prompts

    def follow(self, rows: Mapping[int, Ints], sure: Mapping[int, int] | None = None) -> Logits:
        self._begin(0)
        return super().follow(rows, sure)

    def probe(
        self, rows: Mapping[int, Ints], known: Mapping[int, int]
    ) -> dict[int, tuple[int, Logits]]:
        self._begin(BACK)  # what is looked back at comes behind
        return super().probe(rows, known)

    def ending(self, row: int, known: int) -> None:
        """A row is held from its first token on, which costs little."""

    @property
    def joins(self) -> bool:
        """A row takes the target's cache over before anything else, which is not told of rows that join."""
        return False

    def _begin(self, back: int) -> None:
        """Hold the tokens of every row, whichever are asked for first, but for the last and `back` before it."""
        if self._session.lengths.any():
            return
        all_ = np.array([row.seen.size - 1 for row in self._rows])
        held = np.maximum(all_ - back, 1)
        keep = np.maximum(held - self._runs, 0)
        whole = np.array_equal(self._target.lengths, all_)  # no prompt was pruned
        if not (self._copies and whole and keep.any() and self._session.take(self._target, keep)):
            keep = np.zeros_like(held)
        texts = {i: row.seen[: held[i]] for i, row in enumerate(self._rows)}
        for i, ids in texts.items():
            self._log.put(i, 0, ids[: keep[i]])
        self.run({i: ids[keep[i] :] for i, ids in texts.items()}, prompt=True)
        self._sure = held.copy()
