"""Blocks of tokens that the sessions of a model share: full, never written again, found by what they follow."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
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


class Pool:
    """`arrays`: each part [Z,G,E,..] of all blocks, as a backend makes it. A block that nobody uses stays until its
    place is needed: the one that went unused for longest goes first.

    Whoever uses a block uses all before it, and lets go of the last ones first. So a block outlives those
    that follow it, and its number stands for all tokens up to its end.
    """

    def __init__(self, block: int, arrays: Mapping[str, Any], state_names: Mapping[str, str]):
        """`state_names`: each part -> the state value that holds the same of a row's own slots."""
        self.state_names = state_names
        self.block = block
        self.arrays = arrays
        self.lock = RLock()  # held while blocks are found or filled
        self.total = min((len(a) for a in arrays.values()), default=0)
        self._empty = list(range(self.total))[::-1]
        self._known: dict[_Key, int] = {}
        self._keys: dict[int, _Key] = {}
        self._uses: dict[int, int] = {}  # of blocks that are used
        self._idle: OrderedDict[int, None] = OrderedDict()  # those that are not, the oldest first

    @property
    def stats(self) -> dict[str, int]:
        """total: blocks there is room for; filled: with tokens; used: by sessions now; bytes: of the
        filled ones.
        """
        with self.lock:
            each = sum(a.nbytes // len(a) for a in self.arrays.values())
            filled = len(self._keys)
            return {
                "total": self.total,
                "filled": filled,
                "used": len(self._uses),
                "bytes": filled * each,
            }

    def find(self, tokens: Ints, root: int = ROOT) -> list[int]:
        """The blocks that the tokens [n] begin with, as many as are known, for the caller to use. `root`: what the
        first of them follows.
        """
        found: list[int] = []
        with self.lock:
            last = root
            for start in range(0, len(tokens) - self.block + 1, self.block):
                key = last, _bytes(tokens[start : start + self.block])
                if key not in self._known:
                    break
                last = self._known[key]
                found.append(last)
            self.share(found)
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
        return oldest


def _bytes(tokens: Ints) -> bytes:
    return np.ascontiguousarray(tokens, np.int64).tobytes()
