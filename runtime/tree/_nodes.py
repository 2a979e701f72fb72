"""The nodes of a tree as it grows, and where they come from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

import numpy as np
import numpy.typing as npt

from accel.runtime.inputs.ints import Ints
from accel.runtime.sample import Distribution
from accel.runtime.tree import Draw, Tree

PART = 64  # most numbers of which only the largest is looked at, at first


class Nodes:
    """In the order in which they came: parents before children, siblings as they were picked."""

    def __init__(self, replacement: bool = False) -> None:
        """`replacement`: each of a node's children is drawn from its whole law; those that hold the same token are one
        node.
        """
        self._replacement = replacement
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self._rows: list[int] = []
        self._laws: list[Distribution] = []
        self._draws: list[int] = []

    def add(
        self, parent: int, tokens: Sequence[int], law: Distribution | None = None
    ) -> Sequence[int]:
        """The children of a node, drawn from a law or (None) chosen: the node of each of these tokens."""
        row, nodes, added = -1, dict[int, int](), list[int]()
        if law is not None and tokens:
            row = len(self._laws)
            self._laws.append(law)
        for token in tokens:
            if token not in nodes:
                nodes[token] = len(self.tokens)
                self.tokens.append(token)
                self.parents.append(parent)
                self._rows.append(row)
            added.append(nodes[token])
        self._draws += added
        return added

    def tree(self, nodes: Sequence[int] | None = None) -> Tree:
        """Of these nodes, in rising order, or of all. With a node its parent and its earlier siblings stay."""
        tokens, parents, rows = (
            np.array(self.tokens, np.int64),
            np.array(self.parents, np.int64),
            np.array(self._rows),
        )
        draws = np.array(self._draws, np.int64)
        if nodes is not None:
            place = np.full(tokens.size + 1, -1)  # of ROOT, the last: ROOT
            place[nodes] = np.arange(len(nodes))
            tokens, parents, rows = tokens[nodes], place[parents[nodes]], rows[nodes]
            draws = place[draws][place[draws] >= 0]
        if not self._laws:
            return Tree(tokens, parents)
        width = 1 + max(int(law.tokens[-1]) for law in self._laws)
        q = np.stack([law.dense(width) for law in self._laws])
        return Tree(
            tokens, parents, q, rows, self._replacement, draws if self._replacement else None
        )


def drawn(law: Distribution, draw: Draw) -> Iterator[tuple[int, float]]:
    """Tokens without replacement, as long as any is left that has probability, and the probability of each among
    what was left.
    """
    left = law.weights
    while left.any():
        rest = Distribution(law.tokens, left, law.random)
        token = draw(rest)
        yield token, rest.of(token)
        left = left.copy()
        left[law.tokens.searchsorted(token)] = 0


def likeliest(law: Distribution, count: int) -> tuple[list[int], npt.NDArray[np.float64]]:
    """The up to `count` tokens that have most probability, the lower id first among equals, and their probabilities."""
    places = top(law.weights[None], min(count, law.tokens.size))[0]
    places = places[law.weights[places] > 0]
    return law.tokens[places].tolist(), law.weights[places] / law.total


def children(
    guess: Distribution | None, count: int, draw: Draw | None, replacement: bool = False
) -> list[int]:
    """Up to `count` tokens of a distribution: drawn, or the likeliest. A token that is certain is drawn once."""
    if guess is None:
        return []
    if guess.tokens.size == 1:  # a greedy row's
        return [int(guess.tokens[0])][:count]
    if draw is None:
        return likeliest(guess, count)[0]
    if replacement:
        return [draw(guess) for _ in range(count)]
    return [token for token, _ in islice(drawn(guess, draw), count)]


def top(values: npt.NDArray[np.floating], count: int) -> Ints:
    """The indices of the `count` largest of each row [N,V], the largest first, the lower index among equals: [N,count].

    Of `count` parts the largest is at least as large as the least of them, so that few numbers are left to be sorted.
    """
    rows, size = values.shape
    deep = min(PART, size // max(count, 1))
    if not count or deep < 2:
        return np.argsort(-values, axis=1, kind="stable")[:, :count]
    parts = values[:, : size - size % deep].reshape(rows, deep, -1).max(1)
    least = np.partition(parts, -count, axis=1)[:, -count]
    row, place = np.divmod(
        np.flatnonzero(~(values < least[:, None])), size
    )  # what is no number, too
    order = np.lexsort((place, -values[row, place], row))
    first = row.searchsorted(np.arange(rows))
    found: Ints = place[order][first[:, None] + np.arange(count)]
    return found
