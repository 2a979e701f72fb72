"""Trees that a draft model's session grows behind its rows, level by level, of all rows in one call."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from accel.runtime.backends.protocol import Logits
from accel.runtime.inputs.ints import Ints
from accel.runtime.speculation.follow import Follower
from accel.runtime.tree import Level


class Levels:
    """Each call is of all nodes so far: nothing of a tree is kept, and what stood runs again with what followed it."""

    def __init__(self, follower: Follower, texts: Mapping[int, Ints]):
        """`texts`: the tokens [n] of rows, all of which the follower holds or leaves out."""
        self._follower = follower
        self._nodes = {i: _Nodes(text) for i, text in texts.items()}

    def further(self, levels: Mapping[int, Level]) -> Logits:
        """Add a level to the tree of each of these rows: the logits [B,n,V] after its nodes."""
        for i, level in levels.items():
            self._nodes[i].add(level)
        trees = {i: (np.array(self._nodes[i].tokens), self._nodes[i].mask) for i in levels}
        return self._follower.guess(trees, {i: level.tokens.size for i, level in levels.items()})

    def path(self, row: int, number: int) -> Ints:
        """All tokens of a row up to its node number 1, 2, …; 0: those before its tree."""
        return self._nodes[row].path(number - 1)


class _Nodes:
    """The nodes of a row that were expanded, but for the last committed token, which is number 0 of a level's."""

    def __init__(self, seen: Ints):
        self.seen = seen
        self.tokens: list[int] = []
        self._parents: list[int] = []

    def add(self, level: Level) -> None:
        self.tokens += level.tokens.tolist()
        self._parents += (level.parents - 1).tolist()

    @property
    def mask(self) -> npt.NDArray[np.bool_]:
        """Which of them each one sees."""
        mask = np.eye(len(self.tokens), dtype=np.bool_)
        for node, parent in enumerate(self._parents):
            if parent >= 0:
                mask[node] |= mask[parent]
        return mask

    def path(self, node: int) -> Ints:
        """All tokens up to this one."""
        tokens: list[int] = []
        while node >= 0:
            tokens.append(self.tokens[node])
            node = self._parents[node]
        return np.concatenate([self.seen, tokens[::-1]]).astype(np.int64)
