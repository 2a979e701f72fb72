"""Caches of prompts that the sessions of a model share: parts of them are found by their tokens, wherever they lay."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from threading import RLock

import numpy as np

from accel.runtime.call import Arrays
from accel.runtime.inputs.ints import Ints

_ALIKE = 8  # most places that one anchor is looked up at, the newest: a repeated text would have very many


@dataclass(frozen=True, eq=False)
class Stored:
    """A prompt that was computed without reuse of parts, from position 0 on. Never written.

    tokens: [n]. arrays: keys and values [G,n,D] by the names of the state. space: only rows of the same one find it.
    """

    tokens: Ints
    arrays: Arrays
    space: int


@dataclass(frozen=True)
class Piece:
    """`count` tokens from `start` on of those that were asked for are the tokens from `offset` on of what is stored."""

    start: int
    count: int
    stored: Stored
    offset: int

    def within(self, start: int, stop: int) -> Piece:
        """What of it lies in this span."""
        begin, end = max(self.start, start), min(self.start + self.count, stop)
        return replace(
            self, start=begin, count=max(0, end - begin), offset=self.offset + begin - self.start
        )


class Store:
    """The newest prompts, `room` tokens in all; what was used last stays longest.

    Pieces have `least` tokens or more. An index has every `least / 2`-th place of each stored prompt, with as many
    tokens from there on: each common run that is long enough holds such an anchor whole.
    """

    def __init__(self, room: int, least: int):
        self.room, self.least = room, least
        self.lock = RLock()  # held while the index is read or changed
        self.version = 0  # how often what is stored has changed
        self._anchor = (least + 1) // 2
        self._stored: OrderedDict[int, Stored] = OrderedDict()  # by id, the oldest first
        self._index: dict[tuple[int, bytes], list[tuple[Stored, int]]] = {}

    @property
    def stats(self) -> dict[str, int]:
        """total: tokens there is room for; filled: tokens stored; prompts: how many; bytes: of them all."""
        with self.lock:
            all_of = self._stored.values()
            return {
                "total": self.room,
                "filled": sum(one.tokens.size for one in all_of),
                "prompts": len(all_of),
                "bytes": sum(a.nbytes for one in all_of for a in one.arrays.values()),
            }

    def add(self, space: int, tokens: Ints, arrays: Callable[[], Arrays]) -> None:
        """Store a prompt [n], unless one that begins so is there, or it is too short or long; it replaces those that it
        begins with. `arrays`: makes copies of its keys and values.
        """
        if not self.least <= tokens.size <= self.room:
            return
        with self.lock:
            for one in [one for one in self._stored.values() if one.space == space]:
                same = _common(one.tokens, tokens)
                if same == tokens.size:
                    self._used(one)
                    return
                if same == one.tokens.size:
                    self._drop(one)
            new = Stored(tokens.copy(), arrays(), space)
            self.version += 1
            self._stored[id(new)] = new
            for key, place in self._anchors(new):
                self._index.setdefault(key, []).append((new, place))
            while sum(one.tokens.size for one in self._stored.values()) > self.room:
                self._drop(next(iter(self._stored.values())))

    def prefix(self, space: int, tokens: Ints, use: bool = True) -> Piece | None:
        """The longest stored beginning of the tokens [n]: it holds what they would give, wherever they go on. `use`: it
        stays longer.
        """
        with self.lock:
            found = [
                Piece(0, _common(one.tokens, tokens), one, 0)
                for one in self._stored.values()
                if one.space == space
            ]
            best = max(found, key=lambda piece: piece.count, default=None)
            if best is None or best.count < self.least:
                return None
            if use:
                self._used(best.stored)
            return best

    def matches(self, space: int, tokens: Ints, use: bool = True) -> list[Piece]:
        """All runs of `least` or more of the tokens [n] that are stored, as long as they are; they may overlap. `use`:
        what they are of stays longer.
        """
        found: list[Piece] = []
        ends: dict[tuple[int, int], int] = {}  # of the runs found, by what is stored and its shift
        size = self._anchor
        with self.lock:
            for place in range(len(tokens) - size + 1):
                key = space, _bytes(tokens[place : place + size])
                for stored, offset in self._index.get(key, ())[-_ALIKE:]:
                    run = id(stored), offset - place
                    if place < ends.get(run, 0):
                        continue
                    back = _common(stored.tokens[:offset][::-1], tokens[:place][::-1])
                    ahead = _common(stored.tokens[offset:], tokens[place:])
                    ends[run] = place + ahead
                    if back + ahead >= self.least:
                        found.append(Piece(place - back, back + ahead, stored, offset - back))
            for one in {id(piece.stored): piece.stored for piece in found if use}.values():
                self._used(one)
        return found

    def _anchors(self, entry: Stored) -> Iterable[tuple[tuple[int, bytes], int]]:
        """What the index says of a prompt."""
        size = self._anchor
        for place in range(0, entry.tokens.size - size + 1, size):
            yield (entry.space, _bytes(entry.tokens[place : place + size])), place

    def _used(self, entry: Stored) -> None:
        self._stored.move_to_end(id(entry))

    def _drop(self, entry: Stored) -> None:
        del self._stored[id(entry)]
        for key in {key for key, _ in self._anchors(entry)}:
            left = [each for each in self._index[key] if each[0] is not entry]
            if left:
                self._index[key] = left
            else:
                del self._index[key]


def cover(matches: Iterable[Piece], least: int) -> list[Piece]:
    """Pieces that do not overlap, in order: the longest first, of others what they add, where that is long enough."""
    left, taken = list(matches), []
    while left:
        best = max(left, key=lambda piece: (piece.count, -piece.start))  # of equals the first
        taken.append(best)
        end = max(piece.start + piece.count for piece in left)
        ends = (0, best.start), (best.start + best.count, end)
        cut = [piece.within(*span) for piece in left for span in ends]
        left = [piece for piece in cut if piece.count >= least]
    return sorted(taken, key=lambda piece: piece.start)


def most_alike(matches: Iterable[Piece], least: int) -> list[Piece]:
    """The same, of the one stored prompt that covers most."""
    apart: dict[int, list[Piece]] = {}
    for piece in matches:
        apart.setdefault(id(piece.stored), []).append(piece)
    covers = [cover(pieces, least) for pieces in apart.values()]
    return max(covers, key=lambda pieces: sum(piece.count for piece in pieces), default=[])


def _common(a: Ints, b: Ints) -> int:
    """How many tokens both begin with."""
    count = min(len(a), len(b))
    differ = a[:count] != b[:count]
    return int(differ.argmax()) if differ.any() else count


def _bytes(tokens: Ints) -> bytes:
    return np.ascontiguousarray(tokens, np.int64).tobytes()
