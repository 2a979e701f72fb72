"""A datastore: texts of tokens with the order of their suffixes, memory-mapped, so that what followed a few tokens is
found by binary search. `tools/datastore.py` makes it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from operator import index
from pathlib import Path

import numpy as np
import numpy.typing as npt

from accel.runtime.inputs.ints import Ints
from accel.runtime.speculation.data_folder import damaged, read, some, write
from accel.runtime.speculation.texts import GAP

DEPTH = 64  # tokens that suffixes are ordered by, at least
Line = npt.NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class Datastore:
    """tokens [n], texts with a `GAP` before each, in shards whose first places are `starts`; order [n]: each shard's
    places, by the suffixes that begin there.
    """

    tokens: Line
    order: Line
    starts: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return self.tokens.nbytes + self.order.nbytes

    @classmethod
    def of(cls, tokens: npt.ArrayLike, shard: int = 1 << 22) -> Datastore:
        """Of tokens [n], in shards of at most so many, or of one text where it is longer."""
        line = np.asarray(tokens, np.int32)
        starts, texts = [0], np.flatnonzero(line == GAP)
        while line.size - starts[-1] > shard and (later := texts[texts > starts[-1]]).size:
            near = later[later <= starts[-1] + shard]
            starts.append(int(near[-1] if near.size else later[0]))
        ends = [*starts[1:], line.size]
        parts = [suffix_order(line[a:b]) + a for a, b in zip(starts, ends, strict=True)]
        return cls(line, np.concatenate(parts).astype(np.int32), tuple(starts))

    def save(self, folder: Path, vocab_size: int, digest: str) -> None:
        """Write it; `digest`: of the vocabulary, or empty."""
        arrays, starts = {"tokens": self.tokens, "order": self.order}, list(self.starts)
        write(folder, "datastore", arrays, vocab_size, digest, starts=starts)

    @classmethod
    def open(cls, folder: Path, name: str, vocab_size: int, digest: str) -> Datastore:
        """Map a folder's arrays. Raises RecipeError, as `data_folder.read`."""
        arrays, told = read(folder, "datastore", name, vocab_size, digest)
        try:
            found = cls(arrays["tokens"], arrays["order"], tuple(map(index, told["starts"])))
        except (KeyError, TypeError) as error:
            raise damaged(name, folder, error, "datastore") from error
        if not found._in_range(vocab_size):
            raise damaged(name, folder, "its numbers are out of range", "datastore")
        return found

    def find(self, tail: Ints, most: int) -> tuple[int, Ints]:
        """The size of the longest end of tail [m] that occurs, and the places behind its occurrences, at most `most` of
        each shard.
        """
        size, places = 0, np.zeros(0, np.int64)
        for start, end in zip(self.starts, (*self.starts[1:], self.order.size), strict=True):
            order = self.order[start:end]
            low, high, found = size, tail.size, (0, 0)  # all up to low occur, or are too few
            while low < high:
                half = (low + high + 1) // 2
                if (bounds := self._bounds(order, tail[-half:].tolist()))[0] < bounds[1]:
                    low, found = half, bounds
                else:
                    high = half - 1
            if low > size:
                size, places = low, places[:0]
            elif size:  # as long as another shard's
                found = self._bounds(order, tail[-size:].tolist())
            hits = order[found[0] : min(found[1], found[0] + most)].astype(np.int64) + size
            places = np.concatenate([places, hits])
        return size, places

    def _in_range(self, vocab_size: int) -> bool:
        """Whether some of the numbers are tokens, and places."""
        size, tokens, order = self.tokens.size, some(self.tokens), some(self.order)
        inside = (tokens >= GAP) & (tokens < vocab_size) & (order >= 0) & (order < size)
        rising = [0, *self.starts[1:]] == sorted(set(self.starts)) and self.starts[-1] <= size
        return size == self.order.size and rising and bool(inside.all())

    def _bounds(self, order: Line, query: Sequence[int]) -> tuple[int, int]:
        """From where to where in a shard's order suffixes begin with these tokens."""

        def key(place: int) -> list[int]:
            found: list[int] = self.tokens[place : place + len(query)].tolist()
            return found

        query = list(query)
        first = bisect_left(order, query, key=key)
        return first, bisect_right(order, query, lo=first, key=key)


def suffix_order(tokens: Line) -> Line:
    """The places [n] of tokens [n] by the suffixes that begin there, of equal `DEPTH` or more tokens the earlier first.

    Ranks by twice as many tokens come of two ranks by so many (Manber and Myers, 1993).
    """
    if not tokens.size:
        return np.zeros(0, np.int32)
    ranks = np.unique(tokens, return_inverse=True)[1].astype(np.int64)
    order, width = np.argsort(ranks, kind="stable"), 1
    while width < DEPTH and ranks.max() < tokens.size - 1:
        after = np.zeros_like(ranks)  # what ends comes first
        after[: max(0, ranks.size - width)] = ranks[width:] + 1
        key = ranks * (tokens.size + 1) + after
        order = np.argsort(key, kind="stable")
        ranks[order] = np.concatenate([[0], np.cumsum(np.diff(key[order]) > 0)])
        width *= 2
    return order.astype(np.int32)
