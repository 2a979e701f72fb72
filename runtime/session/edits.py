"""Sessions whose tokens can be edited: what follows is moved to its new positions, not computed again."""

from __future__ import annotations

from typing import Any, Self

import numpy as np

from accel.ir.errors import InputError
from accel.runtime.backends.protocol import Arrays, Logits, Stepper
from accel.runtime.inputs.ints import Ints, as_ints, check_vocabulary
from accel.runtime.session.observers.observer import Capabilities, Companion
from accel.runtime.session.observers.token_log import Log
from accel.runtime.session.session import Session


class _Written(Companion):
    """Which tokens the rows hold."""

    capabilities = Capabilities(trees=False)

    def __init__(self, log: Log):
        self.log = log

    def after(self, tokens: Ints, positions: Ints, queries: Arrays) -> None:
        """See Companion."""
        self.log.note(tokens, positions)

    def select(self, rows: Ints) -> None:
        """See Companion."""
        self.log.select(rows)

    def copy(self) -> Self:
        """See Companion."""
        return type(self)(self.log.copy())


class EditableSession(Session):
    """See `Session`; of a model that was built with `kv.reuse = pie`. The i-th slot of a row holds token i."""

    def __init__(self, stepper: Stepper, batch: int, **options: Any):
        super().__init__(stepper, batch, **options)
        self._companions += (_Written(Log(batch)),)

    @property
    def _log(self) -> Log:
        (found,) = (one.log for one in self._companions if isinstance(one, _Written))
        return found

    def edit(self, start: int, stop: int, tokens: Any, row: int = 0) -> Logits:
        """Replace the tokens from `start` up to `stop` of a row by `tokens` [n], and return the logits [B,1,V]
        after the row's last token (0 for other rows).

        The new tokens see what comes before them. Tokens behind them keep their values, and their keys
        are rotated to where they now are; only the last one is run again. So an edit at the end is exact, and
        others are close. Raises InputError; an edit that fails leaves the session as it was.
        """
        stepper = self._open()
        ids, held = self._edit(start, stop, tokens, row), self._lengths.copy()
        length, delta = int(held[row]), start + len(ids) - stop
        if length + delta == 0:
            raise InputError(f"the edit would leave nothing of row {row}; use rewind(0)")
        before = self._slots_of(row, start, length)
        after = {
            n: a[..., stop - start :] if a.ndim == 1 else a[:, stop - start :]
            for n, a in before.items()
        }
        last = self._log.ids[row, length - 1 if stop < length else start - 1]
        behind = self._log.ids[row, stop:length].copy()
        moved = self._moved(stepper, after, delta)
        try:
            self._set(row, start)
            logits = self._append(row, ids) if len(ids) else None
            if logits is None or stop < length:
                self._need(stepper, [max(length + delta, *(self._room or [0]))])
                self._put(row, start + len(ids), moved)
                self._log.put(row, start + len(ids), behind)
                self._set(row, length + delta - 1)
                logits = self._append(row, np.array([last]))
        except BaseException:
            self._put(row, start, before)
            self._lengths = held
            raise
        return logits

    def _edit(self, start: int, stop: int, tokens: Any, row: int) -> Ints:
        """The new tokens [n], checked like the rest."""
        if not 0 <= row < self.batch:
            raise InputError(f"row is {row}; this session has rows 0..{self.batch - 1}")
        length = int(self._lengths[row])
        if not 0 <= start <= stop <= length:
            raise InputError(
                f"start = {start} and stop = {stop} are no span of row {row}, which holds {length} tokens; give "
                f"0 <= start <= stop <= {length}"
            )
        ids = as_ints(tokens, "tokens") if np.size(tokens) else np.zeros(0, np.int64)
        if ids.ndim != 1:
            raise InputError(f"tokens have shape {list(ids.shape)}; an edit of one row takes [n]")
        check_vocabulary(ids, self.vocab_size, "tokens")
        if (after := length + start + len(ids) - stop) > self.max_context:
            raise InputError(
                f"row {row} would hold {after} tokens; max_context is {self.max_context}. Give fewer tokens"
            )
        return ids

    def _append(self, row: int, ids: Ints) -> Logits:
        """Run tokens [n] of one row."""
        tokens, counts = np.zeros((self.batch, len(ids)), np.int64), np.zeros(self.batch, np.int64)
        tokens[row], counts[row] = ids, len(ids)
        return self.run(tokens, counts, last_only=True)

    def _set(self, row: int, length: int) -> None:
        self._lengths = self._lengths.copy()
        self._lengths[row] = length
        self._kin = self._kin.rewound(self._lengths)

    def _moved(self, stepper: Stepper, after: Arrays, delta: int) -> Arrays:
        """Keys [G,S,D] rotated by `delta` positions; values as they are."""
        count = len(after.get("kv.pos", ()))
        if not delta or not count:
            return after
        layers = [n.split(".")[1] for n in after if n.endswith(".k")]
        given: Arrays = {f"keys.{i}": after[f"kv.{i}.k"][None] for i in layers}
        given["delta"] = np.full((1, count), delta)
        turned = stepper.part("shift", given)
        return {**after, **{f"kv.{i}.k": turned[f"turned.{i}"][0] for i in layers}}

    def _slots_of(self, row: int, start: int, stop: int) -> Arrays:
        """A copy of what a row's slots hold, without axis B."""
        held = self._open().held()
        return {
            n: (a[row][start:stop] if a.ndim == 2 else a[row][:, start:stop]).copy()
            for n, a in held.items()
        }

    def _put(self, row: int, start: int, arrays: Arrays) -> None:
        """Let a row's slots from `start` on hold these, at the positions that they now have."""
        held = self._open().held()
        for name, array in arrays.items():
            if array.ndim == 1:
                held[name][row, start : start + len(array)] = np.arange(start, start + len(array))
            else:
                held[name][row, :, start : start + array.shape[1]] = array
