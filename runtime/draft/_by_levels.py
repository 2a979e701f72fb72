"""Trees that a draft model's session expands level by level, of all rows in one call."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from accel.runtime.backends.protocol import Logits
from accel.runtime.draft import More
from accel.runtime.draft._beside import Beside
from accel.runtime.inputs.ints import Ints
from accel.runtime.sample import Distribution
from accel.runtime.tree import Guesses, Level, Tree, grown


class ByLevels(Beside):
    """Each call is of all nodes so far: nothing of a tree is kept, and what stood runs again with what followed it. A
    length is asked of the nodes that the tree goes on from.
    """

    def draft(self, limits: Mapping[int, int], more: More) -> Mapping[int, Tree]:
        sizes = {i: self._follower.most(self.size(i) + 1, limit) for i, limit in limits.items()}
        nodes = {i: _Nodes(self.rows[i].seen) for i, most in sizes.items() if most > 0}
        said: dict[int, list[Logits]] = {}  # of each row, after each node that was expanded

        def goes_on(i: int, level: Level) -> bool:
            return more.more(i, level, [said[i][parent] for parent in level.parents])

        def expand(levels: dict[int, Level]) -> dict[int, Guesses]:
            first = not said
            if first:
                logits = self.follow(list(levels))[:, -1:]
                said.update({i: [] for i in levels})
            else:
                levels = {i: level for i, level in levels.items() if goes_on(i, level)}
                if not levels:
                    return {}
                for i, level in levels.items():
                    nodes[i].add(level)
                trees = {i: (np.array(nodes[i].tokens), nodes[i].mask) for i in levels}
                logits = self._follower.guess(
                    trees, {i: level.tokens.size for i, level in levels.items()}
                )
            new = {
                i: [logits[i, n, : self._vocab] for n in range(level.tokens.size)]
                for i, level in levels.items()
            }
            found: dict[int, Guesses] = {}
            for i in more.draws(new):
                number = len(said[i])
                said[i] += new[i]
                found[i] = [
                    self._law(i, line, nodes[i].path(number + n - 1))
                    for n, line in enumerate(new[i])
                ]
            return found

        self._trees = grown(
            {i: self.shapes[i].grow(sizes[i], self.draws[i]) for i in nodes}, expand
        )
        return self._trees

    def _law(self, i: int, logits: Logits, seen: Ints) -> Distribution:
        """What may follow a node, by the row's sampler; all of it where a greedy row's children are chosen."""
        if self.rows[i].sampler.greedy:
            scores = self.rows[i].sampler.scores(logits, seen)
            return Distribution(np.arange(scores.size), np.exp(scores - scores.max()))
        return self.rows[i].sampler.distribution(logits, seen)


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
