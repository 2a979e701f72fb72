"""The nodes of a tree as it grows."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from accel.runtime.ints import Ints
from accel.runtime.sample import Distribution
from accel.runtime.tree import Draw, Tree

PART = 64  # tokens of which only the largest weight is looked at, at first


class Nodes:
    """Children drawn with `draw`, or chosen without."""

    def __init__(self, draw: Draw | None):
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self._draw = draw
        self._rows: list[int] = []
        self._laws: list[Distribution] = []

    def add(self, parent: int, guess: Distribution | Ints, count: int) -> list[int]:
        """Up to `count` children of a node, fewer where no more have any probability: the nodes."""
        row = -1
        if not isinstance(guess, Distribution):
            tokens = [t for t in guess[:count].tolist() if t >= 0]
        elif self._draw is None:
            tokens = likeliest(guess, count)[0].tolist()
        else:
            tokens, row = children(guess, count, self._draw), len(self._laws)
            self._laws.append(guess)
        first = len(self.tokens)
        self.tokens += tokens
        self.parents += [parent] * len(tokens)
        self._rows += [row] * len(tokens)
        return list(range(first, len(self.tokens)))

    def tree(self) -> Tree:
        """What has grown."""
        tokens, parents = np.array(self.tokens, np.int64), np.array(self.parents, np.int64)
        if not self._laws:
            return Tree(tokens, parents)
        width = 1 + max(int(law.tokens[-1]) for law in self._laws)
        return Tree(tokens, parents, np.stack([law.dense(width) for law in self._laws]), np.array(self._rows))


def children(law: Distribution, count: int, draw: Draw) -> list[int]:
    """Up to `count` tokens of a distribution without replacement, in the order of drawing."""
    drawn: list[int] = []
    left = law.weights
    while len(drawn) < count and left.any():
        drawn.append(draw(Distribution(law.tokens, left, law.random)))
        left = left.copy()
        left[law.tokens.searchsorted(drawn[-1])] = 0
    return drawn


def likeliest(law: Distribution, count: int) -> tuple[Ints, npt.NDArray[np.float64]]:
    """The up to `count` tokens of a distribution that have most probability, and that; the first is the likeliest, the
    lower id among equals.
    """
    places = top(law.weights[None], min(count, law.tokens.size))[0]
    places = places[law.weights[places] > 0]
    return law.tokens[places], law.weights[places] / law.total


def top(values: npt.NDArray[np.floating], count: int) -> Ints:
    """The indices of the `count` largest of each row [N,V], the largest first, the lower index among equals: [N,count].

    The largest `count` lie in the `count` parts whose own largest are largest, so that of a long row little is sorted.
    """
    rows, size = values.shape
    places = np.arange(size)[None]
    if size > 2 * PART * count:
        whole = size // PART * PART
        parts = values[:, :whole].reshape(rows, -1, PART).max(2)
        chosen = np.sort(top(parts, count), axis=1)
        places = (chosen[:, :, None] * PART + np.arange(PART)).reshape(rows, -1)
        places = np.concatenate([places, np.broadcast_to(np.arange(whole, size), (rows, size - whole))], axis=1)
        values = np.take_along_axis(values, places, axis=1)
    order = np.argsort(-values, axis=1, kind="stable")[:, :count]
    return np.take_along_axis(np.broadcast_to(places, values.shape), order, axis=1)
