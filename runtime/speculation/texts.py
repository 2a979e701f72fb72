"""What requests wrote, for the drafters of later ones: texts in one array, the oldest dropped where it is full."""

from __future__ import annotations

from threading import Lock

import numpy as np
import numpy.typing as npt

from accel.ir.errors import RecipeError
from accel.runtime.inputs.ints import Ints

GAP = -1  # before each text, so that no match goes from one to the next
SIZE = 4  # bytes of a token
FEW = 256  # matches that are compared over their whole length at once
Texts = npt.NDArray[np.int32] | Ints


class TextStore:
    """Texts of tokens, int32, each after a `GAP`; of at most `most` bytes, those of the oldest texts given up."""

    def __init__(self, most: int):
        self._most = most // SIZE
        self._lock = Lock()
        self._tokens = np.zeros(0, np.int32)
        self._size = 0

    @property
    def bytes(self) -> int:
        return self._tokens.nbytes

    @property
    def tokens(self) -> npt.NDArray[np.int32]:
        """All texts [n], a view that later ones do not change: they are written behind it, or elsewhere."""
        with self._lock:
            return self._tokens[: self._size]

    def add(self, text: Ints) -> None:
        """Take a text, or the end of it where all of it does not fit."""
        text = text[-(self._most - 1) :]
        if not text.size:
            return
        with self._lock:
            first = self._size
            if first + text.size >= self._tokens.size:
                first = self._make_room(text.size + 1)
            self._tokens[first] = GAP
            self._tokens[first + 1 : first + 1 + text.size] = text
            self._size = first + 1 + text.size

    def _make_room(self, more: int) -> int:
        """Move the newest texts, up to half of what there may be, into an array with room for more: their size."""
        keep = self._tokens[: self._size]
        if keep.size + more > self._most:
            keep = keep[max(0, keep.size - min(self._most // 2, self._most - more)) :]
            keep = keep[np.flatnonzero(keep == GAP)[0] if (keep == GAP).any() else keep.size :]
        room = min(self._most, max(2 * (keep.size + more), 1024))
        tokens = np.zeros(room, np.int32)
        tokens[: keep.size] = keep
        self._tokens = tokens
        return int(keep.size)


def check_room(name: str, most: int, size: int, tokens: int) -> None:
    """Raise RecipeError where a store of `most` bytes, `size` for a token, does not hold a request of `tokens`."""
    if most < size * (tokens + 1):
        raise RecipeError(
            f"draft.{name}: a store of bytes = {most} is smaller than a request of this model, of up to {tokens} "
            f"tokens; give at least {size * (tokens + 1)}, or leave `shared` out"
        )


def matches(text: Texts, tail: Ints) -> tuple[Ints, Ints]:
    """The place [k] behind each occurrence of the newest token of `tail` [m], and how many of the newest tokens are
    the same before it [k]: 1 to m.
    """
    ends = np.flatnonzero(text == tail[-1]) + 1
    lengths, alike, size = np.ones(ends.size, np.int64), np.arange(ends.size), 1
    while alike.size > FEW and size < tail.size:
        before = ends[alike] - 1 - size
        alike = alike[(text[np.maximum(before, 0)] == tail[-1 - size]) & (before >= 0)]
        size += 1
        lengths[alike] = size
    if alike.size and size < tail.size:
        before = ends[alike, None] - 1 - np.arange(size, tail.size)
        same = (text[np.maximum(before, 0)] == tail[-1 - size :: -1]) & (before >= 0)
        lengths[alike] += same.cumprod(1).sum(1)
    return ends, lengths
