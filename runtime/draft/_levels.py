"""Trees that a draft model's session grows behind its rows, level by level, of all rows in one call."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from accel.runtime.call import Logits
from accel.runtime.inputs.ints import Ints
from accel.runtime.speculation.follow import Follower
from accel.runtime.tree import Level


class Levels:
    """Each call is of a level and all that leads to it: nothing of a tree is kept, and what stood runs again with what
    followed it.
    """

    def __init__(self, follower: Follower, texts: Mapping[int, Ints]):
        """`texts`: the tokens [n] of rows, all of which the follower holds or leaves out."""
        self._follower = follower
        self._nodes = {i: _Nodes(text) for i, text in texts.items()}

    def further(self, levels: Mapping[int, Level]) -> Logits:
        """Add a level to the tree of each of these rows: the logits [B,n,V] after its nodes."""
        trees = {i: self._nodes[i].add(level) for i, level in levels.items()}
        return self._follower.guess(trees, {i: level.tokens.size for i, level in levels.items()})

    def wide(self, row: int, level: Level) -> int:
        """Tokens that a row's call would have with this level."""
        return len(self._nodes[row].above(level)) + level.tokens.size

    def depth(self, row: int, level: Level) -> int:
        """How deep the nodes of a level are; 1: they follow the last committed token."""
        return 1 + self._nodes[row].depth(int(level.parents[0]) - 1)

    def path(self, row: int, number: int) -> Ints:
        """All tokens of a row up to its node number 1, 2, …; 0: those before its tree."""
        return self._nodes[row].path(number - 1)


class _Nodes:
    """The nodes of a row that were expanded, but for the last committed token, which is number 0 of a level's."""

    def __init__(self, seen: Ints):
        self.seen = seen
        self.tokens: list[int] = []
        self._parents: list[int] = []

    def add(self, level: Level) -> tuple[Ints, npt.NDArray[np.bool_]]:
        """Add a level: it and what leads to it, tokens [n], and which of them each one sees [n,n]."""
        first = len(self.tokens)
        nodes = [*self.above(level), *range(first, first + level.tokens.size)]
        self.tokens += level.tokens.tolist()
        self._parents += (level.parents - 1).tolist()
        place = {node: n for n, node in enumerate(nodes)}
        mask = np.eye(len(nodes), dtype=np.bool_)
        for n, node in enumerate(nodes):
            if (parent := self._parents[node]) >= 0:
                mask[n] |= mask[place[parent]]
        return np.array([self.tokens[node] for node in nodes], np.int64), mask

    def above(self, level: Level) -> list[int]:
        """The nodes that lead to a level, in their order."""
        found = set[int]()
        for node in (level.parents - 1).tolist():
            while node >= 0 and node not in found:
                found.add(node)
                node = self._parents[node]
        return sorted(found)

    def depth(self, node: int) -> int:
        """How many nodes lead to this one, itself included."""
        count = 0
        while node >= 0:
            node, count = self._parents[node], count + 1
        return count

    def path(self, node: int) -> Ints:
        """All tokens up to this one."""
        tokens: list[int] = []
        while node >= 0:
            tokens.append(self.tokens[node])
            node = self._parents[node]
        return np.concatenate([self.seen, tokens[::-1]]).astype(np.int64)
