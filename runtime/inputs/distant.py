"""Logits that stay on the device that computed them: a loop reads the few that it needs."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from numpy.lib.mixins import NDArrayOperatorsMixin

from accel.runtime.inputs.ints import Ints

Floats = npt.NDArray[np.float32]
LEAST_LARGEST = (
    64  # logits of a row that are fetched at once where more than the largest is asked for
)


class Source(Protocol):
    """Where the logits [R,V] lie."""

    def whole(self) -> Floats:
        """All of them, float32 [R,V]."""

    def largest(self, count: int) -> tuple[Ints, Floats]:
        """The tokens of the `count` largest of each row [R,count] and their logits, falling."""


class _Held:
    """What is known of a call's logits here; the rest is fetched once, when it is asked for."""

    def __init__(self, source: Source, tokens: Ints, values: Floats, width: int):
        self.source, self.tokens, self.values, self.width = source, tokens, values, width
        self._whole: Floats | None = None
        self._few: tuple[Ints, Floats] | None = None

    def whole(self) -> Floats:
        if self._whole is None:
            self._whole = self.source.whole()
        return self._whole

    def few(self, count: int) -> tuple[Ints, Floats]:
        """At least one more than `count` of each row, where there are as many."""
        if self._few is None or self._few[0].shape[1] <= min(count, self.width - 1):
            most = min(self.width, max(LEAST_LARGEST, 1 << count.bit_length()))
            self._few = self.source.largest(most)
        return self._few


class Distant(NDArrayOperatorsMixin):
    """Logits [..., V] that are read as an array is, and not written. The largest of each row is here; `largest` fetches
    some more, and anything else all of them, once for a call. They stay what they are when the next call runs.
    """

    def __init__(self, numbers: _Held, rows: Ints, real: npt.NDArray[np.bool_] | None = None):
        """rows [...]: which rows of `numbers`. real [R]: those of tokens; others are read as 0."""
        self._held, self._rows, self._real = numbers, rows, real

    @classmethod
    def of(cls, source: Source, tokens: Ints, values: Floats, width: int) -> Distant:
        """Logits [B,N,width] of a source, by the largest of each: its token and itself, [B,N]."""
        numbers = _Held(source, tokens.reshape(-1), values.reshape(-1), width)
        return cls(numbers, np.arange(tokens.size).reshape(tokens.shape))

    @property
    def shape(self) -> tuple[int, ...]:
        """As an array has it."""
        return (*self._rows.shape, self._held.width)

    @property
    def ndim(self) -> int:
        """As an array has it."""
        return self._rows.ndim + 1

    @property
    def size(self) -> int:
        """As an array has it."""
        return self._rows.size * self._held.width

    @property
    def dtype(self) -> np.dtype[np.float32]:
        """As an array has it."""
        return np.dtype(np.float32)

    def only(self, real: npt.NDArray[np.bool_]) -> Distant:
        """The same, where the rows that are not `real` [...] are 0."""
        mask = np.zeros(self._held.tokens.size, np.bool_)
        mask[self._rows[real]] = True
        return Distant(self._held, self._rows, mask)

    def argmax(self, axis: int | None = None) -> Any:
        """The likeliest token of each row [...], of equals the first."""
        return self._of_best("tokens", axis, "argmax")

    def max(self, axis: int | None = None) -> Any:
        """Its logit [...]."""
        return self._of_best("values", axis, "max")

    def _of_best(self, part: str, axis: int | None, name: str) -> Any:
        if axis not in ((None, -1, 0) if self.ndim == 1 else (-1, self.ndim - 1)):
            return getattr(np.asarray(self), name)(axis)
        found = getattr(self._held, part)[self._rows]
        return found if self._real is None else np.where(self._real[self._rows], found, 0)[()]

    def largest(self, count: int) -> tuple[Ints, Floats] | None:
        """Of one row [V] the tokens, rising, that are no less likely than the `count`-th, and their logits; None where
        so many are equal that it takes all to say.
        """
        if self.ndim != 1 or not 0 < count <= self._held.width or self._real is not None:
            return None
        row = int(self._rows)
        ids, values = (part[row] for part in self._held.few(count))
        least = values[count - 1]
        if ids.size < self._held.width and not values[-1] < least:
            return None
        keep = values >= least
        order = np.argsort(ids[keep])
        return ids[keep][order], values[keep][order]

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> Any:
        parts = index if isinstance(index, tuple) else (index,)
        if any(part is Ellipsis for part in parts) or (
            sum(np.asarray(p).ndim if _is_mask(p) else p is not None for p in parts)
            > self._rows.ndim
        ):
            return np.asarray(self)[index]
        return Distant(self._held, np.asarray(self._rows[index]), self._real)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        found = self._held.whole().take(self._rows, axis=0)
        if self._real is not None:
            found[~self._real[self._rows]] = 0
        return found if dtype is None else found.astype(dtype, copy=False)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        arrays = [np.asarray(x) if isinstance(x, Distant) else x for x in inputs]
        return getattr(ufunc, method)(*arrays, **options)

    def __getattr__(self, name: str) -> Any:
        """What else an array has."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(np.asarray(self), name)


def _is_mask(part: Any) -> bool:
    return isinstance(part, np.ndarray) and part.dtype == np.bool_
