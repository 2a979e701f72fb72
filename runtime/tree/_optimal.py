"""The forms of which most tokens stand (Sequoia, arXiv:2402.12374, section 3.1): a dynamic programme."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from accel.runtime.inputs.ints import Ints
from accel.runtime.tree._shaped import Path


class Optimal:
    """For trees of up to `nodes` nodes, the root among them, and of up to `depth` levels below it.

    rates [W]: how often the child of each rank is the one that stands, given that its parent does.
    `expected` [depth+1,nodes+1]: tokens of a call, the one after the last that stands too, of the best tree of so
    many levels at most and of so many nodes; -inf where there is none.
    """

    def __init__(self, rates: Sequence[float], nodes: int, depth: int):
        self.expected = np.full((depth + 1, nodes + 1), -np.inf)
        self.expected[0, 1] = 1.0
        self._parts: list[list[Ints]] = [
            []
        ]  # [level][children - 1][nodes]: how many go to all but the last child
        self._children: list[Ints] = [np.zeros(nodes + 1, np.int64)]
        for level in range(1, depth + 1):
            self._level(rates, level)

    def paths(self, nodes: int, depth: int) -> list[Path]:
        """The best form of so many nodes, of which one is the root: each path after its parent's and after those of
        the siblings of lower rank.
        """
        return sorted(self._paths(nodes, depth, ()), key=lambda path: (len(path), path))

    def _level(self, rates: Sequence[float], level: int) -> None:
        below, count = self.expected[level - 1], self.expected.shape[1]
        given = np.arange(count)[:, None] - np.arange(
            count
        )  # [m, y]: to the last child, y to the others
        there = (given > 0) & np.isfinite(below[given])
        last = np.where(there, below[given], 0.0)
        best = np.full(count, -np.inf)
        best[1] = 1.0
        self.expected[level], chosen = best, np.zeros(count, np.int64)
        parts: list[Ints] = []
        for rank, rate in enumerate(rates):
            every = np.where(there, best + rate * last, -np.inf)
            parts.append(every.argmax(1))
            best = every.max(1)
            chosen[best > self.expected[level]] = rank + 1
            self.expected[level] = np.maximum(self.expected[level], best)
        self._parts.append(parts)
        self._children.append(chosen)

    def _paths(self, nodes: int, level: int, above: Path) -> list[Path]:
        found: list[Path] = []
        for rank in reversed(range(int(self._children[level][nodes]))):
            others = int(self._parts[level][rank][nodes])
            path = (*above, rank)
            found += [path, *self._paths(nodes - others, level - 1, path)]
            nodes = others
        return found
