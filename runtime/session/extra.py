"""Outputs of a call beside its logits, collected from its graph calls."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import numpy as np

from accel.ir.errors import InputError, unknown
from accel.runtime.backends.protocol import BackendSession
from accel.runtime.call import Arrays
from accel.runtime.inputs.ints import Ints
from accel.runtime.session.observers.observer import CallWatcher


class Extra(CallWatcher):
    """Hears the steps of one call of B rows, whose tokens come in their order: `outputs` are of all of them [B,T,…], or
    of the last of each row [B,1,…].
    """

    def __init__(self, names: Collection[str], batch: int, last_only: bool):
        self._names, self._last_only = names, last_only
        self._parts: list[Arrays] = []
        self._rows: list[Ints] = []  # of each real token of a step, its row and its column
        self._heard: Ints = np.zeros(batch, np.int64)  # tokens of each row

    def before(self, backend: BackendSession, width: int) -> Collection[str]:
        """See CallWatcher."""
        return self._names

    def after(self, tokens: Ints, positions: Ints, extra: Arrays) -> None:
        """See CallWatcher. Tokens that no step ran have none."""
        if not extra.keys() >= set(self._names):
            return
        real = positions >= 0
        self._parts.append({name: extra[name][real] for name in self._names})
        columns = self._heard[:, None] + np.cumsum(real, axis=1) - 1
        rows = np.broadcast_to(np.arange(len(real))[:, None], real.shape)
        self._rows.append(np.stack([rows[real], columns[real]]))
        self._heard = self._heard + real.sum(1)

    def missed(self, counts: Ints) -> bool:
        """Whether fewer tokens of a row ran in steps than `counts` [B]; of the last ones alone, none of them."""
        least = np.minimum(counts, 1) if self._last_only else counts
        return bool((self._heard < least).any())

    def outputs(self) -> Arrays:
        """All that was heard; 0 behind a row's tokens."""
        found: Arrays = {}
        for name in self._names:
            flat = np.concatenate([part[name] for part in self._parts])
            rows, columns = np.concatenate(self._rows, axis=1)
            array = np.zeros(
                (self._heard.size, int(self._heard.max()), *flat.shape[1:]), flat.dtype
            )
            array[rows, columns] = flat
            if self._last_only:
                last = np.maximum(self._heard - 1, 0)
                array = array[np.arange(self._heard.size), last][:, None]
            found[name] = array
        return found


def check_names(what: str, names: Iterable[str], known: Collection[str]) -> None:
    """Raise InputError with the near name where one is not known."""
    for name in names:
        if name not in known:
            raise InputError(unknown(what, name, known))
