"""What drafters hear of the residual stream: the newest rows of outputs of a session's steps."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
import numpy.typing as npt

from accel.runtime.backends.protocol import BackendSession
from accel.runtime.call import Arrays
from accel.runtime.inputs.ints import Ints
from accel.runtime.session.observers.observer import CallWatcher

Floats = npt.NDArray[np.floating[Any]]


class Streams(CallWatcher):
    """Of each row of a session the newest tokens' outputs, until others are asked for. A step gives them only then."""

    def __init__(self) -> None:
        self._names: Collection[str] = ()
        self._most = 0
        self._heard: dict[int, tuple[Ints, Arrays]] = {}

    def ask(self, names: Collection[str], most: int) -> None:
        """From here on hear outputs of these names, of a row's newest `most` tokens; none: of nothing."""
        self._names, self._most, self._heard = names, most, {}

    def of(self, row: int) -> tuple[Ints, Arrays]:
        """The positions [n] of the tokens of a row that were heard, in order, and each output of them [n,…]."""
        return self._heard.get(row, (np.zeros(0, np.int64), {}))

    def before(self, backend: BackendSession, width: int) -> Collection[str]:
        """See CallWatcher."""
        return self._names

    def after(self, tokens: Ints, positions: Ints, extra: Arrays) -> None:
        """See CallWatcher. Tokens that ran without a step are not heard."""
        if not self._names or not all(name in extra for name in self._names):
            return
        for row, places in enumerate(positions):
            real = np.flatnonzero(places >= 0)[-self._most :]
            if not real.size:
                continue
            new = {name: extra[name][row, real].astype(np.float32) for name in self._names}
            before, old = self.of(row)
            if before.size:
                new = {n: np.concatenate([old[n], v])[-self._most :] for n, v in new.items()}
            self._heard[row] = np.concatenate([before, places[real]])[-self._most :], new


class Means(CallWatcher):
    """The mean of an output over all tokens of each row of a session, until it is `over`."""

    def __init__(self, name: str) -> None:
        self.over = False
        self._name = name
        self._sums: dict[int, tuple[int, Floats]] = {}

    def of(self, row: int) -> Floats | None:
        """Of a row [E]; none where none of its tokens was heard."""
        count, total = self._sums.get(row, (0, np.zeros(0)))
        return total / count if count else None

    def before(self, backend: BackendSession, width: int) -> Collection[str]:
        """See CallWatcher."""
        return () if self.over else (self._name,)

    def after(self, tokens: Ints, positions: Ints, extra: Arrays) -> None:
        """See CallWatcher. Tokens that ran without a step are not heard."""
        if self.over or self._name not in extra:
            return
        for row, places in enumerate(positions):
            real = places >= 0
            if real.any():
                count, total = self._sums.get(row, (0, np.zeros(extra[self._name].shape[2])))
                new = extra[self._name][row, real].astype(np.float64)
                self._sums[row] = count + int(real.sum()), total + new.sum(0)
