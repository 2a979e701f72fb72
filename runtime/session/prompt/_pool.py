"""Blocks of tokens that the sessions of a model share: full, never written again, found by what they follow."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from threading import RLock
from typing import Any

import numpy as np
import numpy.typing as npt

from accel.runtime.inputs.ints import Ints

Arrays = dict[str, npt.NDArray[Any]]
ROOT = -1  # what a row's first block follows; less by its adapter's number, where it uses one
_Key = tuple[
    int, bytes
]  # the block before, and the tokens: both compared, so that no hash has to be trusted


@dataclass(frozen=True)
class Snapshot:
    """The recurrent `state` of a row behind some tokens, by name and without axis B: those of a block, and `tokens` [n]
    after it, fewer than fill one. `parts`: what these have in slots, [G,n,..].
    """

    tokens: Ints
    parts: Arrays
    state: Arrays

    @cached_property
    def bytes(self) -> int:
        """Memory that it takes."""
        return sum(a.nbytes for a in (*self.parts.values(), *self.state.values()))


class Pool:
    """`arrays`: each part [Z,G,E,..] of all blocks, as a backend makes it. A block that nobody uses stays until its
    place is needed: the one that went unused for longest goes first.

    Whoever uses a block uses all before it, and lets go of the last ones first. So a block outlives those
    that follow it, and its number stands for all tokens up to its end.

    Of a model with recurrent state it also has snapshots, each behind any number of tokens, for `state_bytes` bytes in
    all: those that went unused for longest go first, and those behind a block go with it.
    """

    def __init__(
        self,
        block: int,
        arrays: Mapping[str, Any],
        state_names: Mapping[str, str],
        total: int,
        state_bytes: int = 0,
    ):
        """`state_names`: each part -> the state value that holds the same of a row's own slots. `total`: blocks."""
        self.state_names = state_names
        self.state_bytes = state_bytes
        self.block = block
        self.arrays = arrays
        self.lock = RLock()  # held while blocks are found or filled
        self.total = total
        self._empty = list(range(self.total))[::-1]
        self._known: dict[_Key, int] = {}
        self._keys: dict[int, _Key] = {}
        self._uses: dict[int, int] = {}  # of blocks that are used
        self._idle: OrderedDict[int, None] = OrderedDict()  # those that are not, the oldest first
        self._snapshots: OrderedDict[_Key, Snapshot] = OrderedDict()  # the one unused longest first
        self._behind: dict[int, set[_Key]] = {}  # those behind a block, or behind none
        self._held = 0  # bytes of them

    @property
    def stats(self) -> dict[str, int]:
        """total: blocks there is room for; filled: with tokens; used: by sessions now; bytes: of the
        filled ones; snapshots: of recurrent state; snapshot_bytes: of them.
        """
        with self.lock:
            each = sum(a.nbytes // len(a) for a in self.arrays.values())
            filled = len(self._keys)
            return {
                "total": self.total,
                "filled": filled,
                "used": len(self._uses),
                "bytes": filled * each,
                "snapshots": len(self._snapshots),
                "snapshot_bytes": self._held,
            }

    def find(self, tokens: Ints, root: int = ROOT) -> list[int]:
        """The blocks that the tokens [n] begin with, as many as are known, for the caller to use. `root`: what the
        first of them follows.
        """
        with self.lock:
            found = self.look(tokens, root)
            self.share(found)
        return found

    def look(self, tokens: Ints, root: int = ROOT) -> list[int]:
        """The same, which nobody uses yet."""
        found: list[int] = []
        with self.lock:
            last = root
            for start in range(0, len(tokens) - self.block + 1, self.block):
                key = last, _bytes(tokens[start : start + self.block])
                if key not in self._known:
                    break
                last = self._known[key]
                found.append(last)
        return found

    def add(self, before: int, tokens: Ints, parts: Mapping[str, npt.NDArray[Any]]) -> int | None:
        """The block of these tokens [E] after another one (ROOT: none), for the caller to use; filled with
        `parts` [G,E,..] where it is not known. None where every block is in use.
        """
        with self.lock:
            key = before, _bytes(tokens)
            found = self._known.get(key)
            if found is None:
                found = self._place()
                if found is None:
                    return None
                for name, array in parts.items():
                    self.arrays[name][found] = array
                self._known[key], self._keys[found] = found, key
            self.share([found])
            return found

    def latest(
        self, tokens: Ints, blocks: list[int], root: int = ROOT
    ) -> tuple[int, Snapshot] | None:
        """Of tokens [n] that begin with these blocks, the snapshot behind most of them, and behind how many blocks it
        is; None where there is none.
        """
        with self.lock:
            for count in range(len(blocks), -1, -1):
                here = self._behind.get(blocks[count - 1] if count else root, ())
                rest = _bytes(tokens[count * self.block : (count + 1) * self.block])
                if found := max(
                    (k for k in here if rest.startswith(k[1])), key=_size, default=None
                ):
                    self._snapshots.move_to_end(found)
                    return count, self._snapshots[found]
        return None

    def keep(self, before: int, snapshot: Snapshot) -> None:
        """Hold a snapshot behind a block (ROOT: none), where there is room for any."""
        with self.lock:
            key = before, _bytes(snapshot.tokens)
            if key in self._snapshots:
                self._snapshots.move_to_end(key)
                return
            if snapshot.bytes > self.state_bytes:
                return
            while self._held + snapshot.bytes > self.state_bytes:
                self._forget(next(iter(self._snapshots)))
            self._snapshots[key] = snapshot
            self._behind.setdefault(before, set()).add(key)
            self._held += snapshot.bytes

    def share(self, blocks: Iterable[int]) -> None:
        """One more use of each."""
        with self.lock:
            for block in blocks:
                self._uses[block] = self._uses.get(block, 0) + 1
                self._idle.pop(block, None)

    def release(self, blocks: list[int]) -> None:
        """One use less of each; they follow one another."""
        with self.lock:
            for block in reversed(blocks):
                self._uses[block] -= 1
                if not self._uses[block]:
                    del self._uses[block]
                    self._idle[block] = None

    def _place(self) -> int | None:
        """A block to fill."""
        if self._empty:
            return self._empty.pop()
        if not self._idle:
            return None
        oldest, _ = self._idle.popitem(last=False)
        del self._known[self._keys.pop(oldest)]
        for key in list(self._behind.get(oldest, ())):
            self._forget(key)
        return oldest

    def _forget(self, key: _Key) -> None:
        """Let go of a snapshot."""
        self._held -= self._snapshots.pop(key).bytes
        behind = self._behind[key[0]]
        behind.remove(key)
        if not behind:
            del self._behind[key[0]]


def _size(key: _Key) -> int:
    return len(key[1])


def _bytes(tokens: Ints) -> bytes:
    return np.ascontiguousarray(tokens, np.int64).tobytes()
