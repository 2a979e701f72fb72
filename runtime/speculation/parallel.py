"""A head's session that says the next tokens of rows in one call: the first by what the target computed, the others in
slots of masks behind it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from accel.runtime.call import Logits
from accel.runtime.inputs.ints import Ints
from accel.runtime.speculation.features import FeatureFollower
from accel.runtime.speculation.independent import by_depth


class ParallelFollower(FeatureFollower):
    """Masks follow the newest token of each row as a guess, which the next call drops. What they say stands for every
    path of a tree.
    """

    _said: npt.NDArray[np.float32] = np.zeros((0, 0, 0), np.float32)

    @property
    def deepest(self) -> int:
        return int(self._said.shape[1]) - 1

    def follow(self, rows: Mapping[int, Ints], sure: Mapping[int, int] | None = None) -> Logits:
        logits = super().follow(rows, sure)[:, -1:]
        session = self._session
        room = session.max_context - int(session.lengths.max())
        width = min(self._head.parallel - 1, room)
        if width < 1:
            self._said = logits[:, :, : session.vocab_size]
            return logits
        counts = np.zeros(session.batch, np.int64)
        counts[list(rows)] = width
        tokens = np.full((counts.size, width), self._head.mask)
        sight = np.tile(np.tri(width, dtype=np.bool_), (counts.size, 1, 1))
        columns = np.tile(np.arange(width), (counts.size, 1))
        features = np.zeros((*tokens.shape, self._head.width), np.float32)
        more = session.guess(
            tokens, sight, counts, columns, embeds=self._embedded(tokens, features)
        )
        self._said = np.concatenate([logits, more], 1)[:, :, : session.vocab_size]
        return logits

    def guess(
        self, rows: Mapping[int, tuple[Ints, npt.NDArray[np.bool_]]], new: Mapping[int, int]
    ) -> Logits:
        """See Follower."""
        return by_depth(self._said, rows, max(new.values()))

    def join(self, other: Any) -> None:
        super().join(other)
        self._said = np.zeros((len(self.cut), 0, self._session.vocab_size), np.float32)

    def leave(self, order: Ints) -> None:
        super().leave(order)
        self._said = self._said[order]
