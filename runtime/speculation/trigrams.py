"""How often tokens followed two others in texts: a table that a tool makes, and one that a drafter adapts."""

from __future__ import annotations

from pathlib import Path
from threading import Lock

import numpy as np
import numpy.typing as npt

from accel.runtime.speculation.data_folder import Arrays, damaged, read, some, write
from accel.runtime.speculation.texts import GAP

FEW = 12  # successors kept of two tokens
PAIR, NEXT = (
    420,
    110,
)  # bytes of two tokens in a table that adapts, and of each successor, at most: Python's own
Successors = list[tuple[int, float]]


class Trigrams:
    """keys [n]: two tokens each (`pair`), rising; after [n]: a token that followed, weights [n]: its relative
    frequency, the heaviest first and at most `FEW` of each key.
    """

    def __init__(
        self,
        keys: npt.NDArray[np.int64],
        after: npt.NDArray[np.int32],
        weights: npt.NDArray[np.float32],
    ):
        self.keys, self.after, self.weights = keys, after, weights

    @property
    def bytes(self) -> int:
        return self.keys.nbytes + self.after.nbytes + self.weights.nbytes

    @classmethod
    def of(cls, tokens: npt.ArrayLike) -> Trigrams:
        """Of texts of tokens [n], each after a `GAP`."""
        line = np.asarray(tokens, np.int64)
        three = np.stack([line[:-2], line[1:-1], line[2:]], 1) if line.size > 2 else line[:0, None]
        three = three[(three != GAP).all(1)].reshape(-1, 3)
        rows, counts = np.unique(three, axis=0, return_counts=True)
        keys = pair(rows[:, 0], rows[:, 1])
        order = np.lexsort((rows[:, 2], -counts, keys))
        keys, after, counts = keys[order], rows[order, 2], counts[order]
        first = keys.searchsorted(keys)
        whole = np.add.reduceat(counts, np.unique(first)) if counts.size else counts
        weights = counts / np.repeat(whole, np.unique(first, return_counts=True)[1])
        kept = np.arange(keys.size) - first < FEW
        return cls(keys[kept], after[kept].astype(np.int32), weights[kept].astype(np.float32))

    def save(self, folder: Path, vocab_size: int, digest: str) -> None:
        """Write it; `digest`: of the vocabulary, or empty."""
        arrays: Arrays = {"keys": self.keys, "after": self.after, "weights": self.weights}
        write(folder, "trigrams", arrays, vocab_size, digest)

    @classmethod
    def open(cls, folder: Path, name: str, vocab_size: int, digest: str) -> Trigrams:
        """Map a folder's arrays. Raises RecipeError, as `data_folder.read`."""
        arrays, _ = read(folder, "trigrams", name, vocab_size, digest)
        try:
            found = cls(arrays["keys"], arrays["after"], arrays["weights"])
        except KeyError as error:
            raise damaged(name, folder, error, "trigrams") from error
        after, weights = some(found.after), some(found.weights)
        inside = (after >= 0) & (after < vocab_size) & (weights > 0) & (weights <= 1)
        if not (found.keys.size == found.after.size == found.weights.size and inside.all()):
            raise damaged(name, folder, "its numbers are out of range", "trigrams")
        return found

    def find(self, first: int, second: int) -> Successors:
        """What followed two tokens, the heaviest first."""
        key = int(pair(first, second))
        low = int(self.keys.searchsorted(key))
        high = low + int(self.keys[low : low + FEW].searchsorted(key, side="right"))
        return list(
            zip(self.after[low:high].tolist(), self.weights[low:high].tolist(), strict=True)
        )


class Adaptive:
    """Weights that grow with what is seen, over those of `base`; of at most `most` bytes, those of the pairs that came
    first given up.
    """

    def __init__(self, most: int, base: Trigrams | None = None):
        self._most, self._base = most, base
        self._lock = Lock()
        self._after = dict[int, dict[int, float]]()
        self._bytes = 0

    @property
    def bytes(self) -> int:
        """Without those of `base`."""
        return self._bytes

    def find(self, first: int, second: int) -> Successors:
        """What may follow two tokens, the heaviest first, of equals the lower id."""
        with self._lock:
            found = self._after.get(int(pair(first, second)))
            if found is not None:
                return sorted(found.items(), key=lambda one: (-one[1], one[0]))
        return [] if self._base is None else self._base.find(first, second)

    def suppose(self, first: int, second: int, after: int, weight: float) -> None:
        """Give a successor that is not known a weight."""
        with self._lock:
            self._at(first, second, after, weight)

    def add(self, first: int, second: int, after: int, more: float, most: float) -> None:
        """Let a successor weigh more, but never more than `most`."""
        with self._lock:
            weights = self._at(first, second, after, 0.0)
            weights[after] = max(weights[after], min(most, weights[after] + more))

    def _at(self, first: int, second: int, after: int, weight: float) -> dict[int, float]:
        """The weights after two tokens, with one for `after`."""
        key = int(pair(first, second))
        weights = self._after.get(key)
        if weights is None:
            weights = self._after[key] = (
                {} if self._base is None else dict(self._base.find(first, second))
            )
            self._bytes += PAIR + NEXT * len(weights)
        if after not in weights:
            weights[after] = weight
            self._bytes += NEXT
        while self._bytes > self._most and len(self._after) > 1:
            oldest = next(iter(self._after))
            if oldest == key:  # it came first, and is needed now
                self._after[key] = self._after.pop(key)
                continue
            self._bytes -= PAIR + NEXT * len(self._after.pop(oldest))
        return weights


def pair(first: npt.ArrayLike, second: npt.ArrayLike) -> npt.NDArray[np.int64]:
    """Two tokens as one number."""
    return np.asarray(first, np.int64) << 32 | np.asarray(second, np.int64)
