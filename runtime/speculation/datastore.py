"""A datastore: texts of tokens with the order of their suffixes, memory-mapped, so that what followed a few tokens is
found by binary search. `tools/datastore.py` makes it.
"""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from accel.ir.errors import RecipeError
from accel.runtime.inputs.ints import Ints
from accel.runtime.speculation.texts import GAP

FORMAT = 1
TOKENS, ORDER, TOLD = "tokens.npy", "order.npy", "datastore.json"
DEPTH = 64  # tokens that suffixes are ordered by, at least
Line = npt.NDArray[np.int32]
MAKE = "make it: python tools/datastore.py MODEL --text FILE --out FOLDER"


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
        """Write it; `digest`: of the vocabulary (`Tokenizer.digest`), or empty."""
        folder.mkdir(parents=True)
        np.save(folder / TOKENS, self.tokens)
        np.save(folder / ORDER, self.order)
        told = {"format": FORMAT, "tokens": int(self.tokens.size), "starts": list(self.starts)}
        told |= {"vocab_size": vocab_size, "vocabulary": digest}
        (folder / TOLD).write_text(json.dumps(told), encoding="utf-8")

    @classmethod
    def open(cls, folder: Path, name: str, vocab_size: int, digest: str) -> Datastore:
        """Map a folder's files. Raises RecipeError, which begins with `name`, where they are not there, damaged, or of
        another vocabulary than the model's, which may have more tokens; an empty digest is not compared.
        """
        if not (folder / TOLD).is_file():
            raise RecipeError(f"{name}: {folder} is no datastore, or was moved; {MAKE}")
        try:
            told: Any = json.loads((folder / TOLD).read_text(encoding="utf-8"))
            tokens, order = (np.load(folder / file, mmap_mode="r") for file in (TOKENS, ORDER))
            found = cls(tokens, order, tuple(told["starts"]))
            size = told["tokens"]
            whole = told["format"] == FORMAT and all(
                one.shape == (size,) and one.dtype == np.int32 for one in (tokens, order)
            )
            of = told["vocab_size"], told["vocabulary"]
        except (OSError, ValueError, KeyError, TypeError, EOFError) as error:
            raise RecipeError(f"{name}: {folder} is damaged ({error}); {MAKE}") from error
        if not whole or not _in_range(found, of[0]):
            raise RecipeError(f"{name}: {folder} is damaged, or of another version; {MAKE}")
        if of[0] > vocab_size or (digest and of[1] and digest != of[1]):
            raise RecipeError(
                f"{name}: {folder} is of another vocabulary, of {of[0]} tokens (the model has {vocab_size}); {MAKE}"
            )
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

    def _bounds(self, order: Line, query: Sequence[int]) -> tuple[int, int]:
        """From where to where in a shard's order suffixes begin with these tokens."""

        def key(place: int) -> list[int]:
            found: list[int] = self.tokens[place : place + len(query)].tolist()
            return found

        query = list(query)
        first = bisect_left(order, query, key=key)
        return first, bisect_right(order, query, lo=first, key=key)


def _in_range(store: Datastore, vocab_size: int) -> bool:
    """Whether the numbers at both ends and some between are tokens, and places."""
    some = np.linspace(0, store.tokens.size - 1, min(store.tokens.size, 4096)).astype(np.int64)
    tokens, order = store.tokens[some], store.order[some]
    inside = (tokens >= GAP) & (tokens < vocab_size) & (order >= 0) & (order < store.tokens.size)
    rising = [0, *store.starts[1:]] == sorted(set(store.starts))
    return bool(inside.all()) and rising and store.starts[-1] <= store.tokens.size


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
