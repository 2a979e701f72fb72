"""Rewinding a state that only goes forward: the tokens of each row, and copies of the state to
replay them from.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import Annotated, Any, Self

import numpy as np
import numpy.typing as npt

from accel.ir.entries.replay import REPLAY, TAKEN
from accel.runtime.backends.protocol import BackendSession
from accel.runtime.call import Arrays, Logits
from accel.runtime.inputs.ints import Ints
from accel.runtime.rows import ByRow, PerRow, PerSession
from accel.runtime.session.modes.edits import run_anew
from accel.runtime.session.observers.observer import (
    Calls,
    CallWatcher,
    Capabilities,
    ModelParts,
    ObserverFactory,
    SessionObserver,
)
from accel.runtime.session.observers.token_log import Log

WIDEST = 64  # tokens of a call that is noted for `replay`, which drafts do not exceed
SNAPSHOTS = 8  # copies of the state that are kept
EVERY = 256  # most single-token calls from one copy to the next
_NEVER = np.iinfo(np.int64).max


@dataclass
class _Saved:
    """The state after `lengths` [B] tokens; _NEVER where a row has since taken another way."""

    lengths: Ints
    state: Any
    pinned: bool = False  # what came before cannot be run again, so it goes last
    rows: Ints | None = None  # which of its rows are those of the session [B]; None: its own

    @property
    def now(self) -> Any:
        """The state of the session's rows."""
        return (
            self.state
            if self.rows is None
            else {name: array[self.rows] for name, array in self.state.items()}
        )


@dataclass(frozen=True)
class _Noted:
    """What the recurrences took in of the last call, whose tokens were at positions [B,T] (-1: padding), by the names
    of `replay`'s inputs. before: the state from before it.
    """

    before: _Saved
    positions: Ints
    operands: Arrays


class RecurrentHistory(SessionObserver, CallWatcher):
    """What a session knows of the tokens behind its recurrent state.

    A copy of the state is taken before and after each call of several tokens and every EVERY single
    tokens, so that plain decoding pays nothing; of many copies those that lie closest go first.

    Where the model has the entry `replay`, the step also gives what its recurrences took in of a call of a few tokens.
    A rewind into that call then runs the recurrences alone, and no token again.
    """

    _log: Annotated[Log, ByRow(name="")]
    _taken: PerRow  # tokens that the state has taken in
    _single: Annotated[int, PerSession()]  # calls of one token since the last copy
    _wide: Annotated[bool, PerSession()]  # whether the last call was one of several tokens

    order = 10  # a state that went forward has gone, whatever another does after the step

    def __init__(self, batch: int, replays: bool = False):
        """`replays`: whether the model has that entry."""
        self._replays = replays
        self._before: _Saved | None = None  # of the call that comes
        self._noted: _Noted | None = None
        self._log = Log(batch)
        self._taken = np.zeros(batch, np.int64)
        self._saved: list[_Saved] = []
        self._single, self._wide = 0, False
        self._copies, self._seconds = 0, 0.0

    @property
    def stats(self) -> dict[str, float]:
        """See SessionObserver."""
        held = {id(saved.state): saved.state for saved in self._saved}
        arrays = (array for state in held.values() for array in state.values())
        return {
            "snapshots": self._copies,
            "snapshot_seconds": self._seconds,
            "snapshot_bytes": sum(array.nbytes for array in arrays),
        }

    @classmethod
    def for_model(cls, model: ModelParts) -> ObserverFactory | None:
        """Where part of the state only goes forward."""
        recurrent = any(value.role == "recurrent" for value in model.state)
        replays = REPLAY.name in model.entries
        return ObserverFactory(lambda batch: cls(batch, replays)) if recurrent else None

    @property
    def capabilities(self) -> Capabilities:
        """See SessionObserver."""
        return Capabilities(free_rewind=False, free_drafts=self._replays, trees=False)

    def catch_up(self, backend: BackendSession, lengths: Ints) -> tuple[Ints, Ints, Ints] | None:
        """Take rows that hold more than `lengths` tokens back to a copy of the state.

        Returns the tokens to run again: ids [B,T], how many of each row [B] and where they start
        [B]; None where there are none.
        """
        if np.array_equal(self._taken, lengths):
            return None
        if self._replayed(backend, lengths):
            return None
        for saved in self._saved:
            saved.lengths[saved.lengths > lengths] = _NEVER
        self._saved = [s for s in self._saved if int(s.lengths.min()) < _NEVER]
        back = self._taken > lengths
        for saved in reversed(self._saved):
            rows = back & (saved.lengths < _NEVER)
            if rows.any():
                backend.restore(saved.now, rows)
                self._taken[rows] = saved.lengths[rows]
                back &= ~rows
        if back.any():
            backend.restore(None, back)
            self._taken[back] = 0
        missing = lengths - self._taken
        if not missing.any():
            return None
        columns = np.arange(int(missing.max()))
        places = np.minimum(self._taken[:, None] + columns, self._log.ids.shape[1] - 1)
        return np.take_along_axis(self._log.ids, places, 1), missing, self._taken.copy()

    def _replayed(self, backend: BackendSession, lengths: Ints) -> bool:
        """Take the state to behind `lengths` [B] tokens, where they end within the last call. Whether they do."""
        noted, self._noted = self._noted, None
        if noted is None or (lengths < noted.before.lengths).any() or (lengths > self._taken).any():
            return False
        backend.restore(noted.before.now, np.ones(lengths.size, np.bool_))
        positions = np.where(noted.positions < lengths[:, None], noted.positions, -1)
        backend.part(REPLAY.name, {"positions": positions, **noted.operands})
        for saved in self._saved:
            saved.lengths[saved.lengths > lengths] = _NEVER
        self._taken = lengths.copy()
        return True

    def before(self, backend: BackendSession, width: int) -> Collection[str]:
        """Copy the state where it is due, before a call of `width` columns."""
        self._copy(backend, width)
        self._before, self._noted = None, None
        if not self._replays or not 1 < width <= WIDEST or not self._saved:
            return ()
        if np.array_equal(self._saved[-1].lengths, self._taken):
            self._before = self._saved[-1]
        return [n for n in backend.extra if n.startswith(TAKEN)] if self._before else ()

    def _copy(self, backend: BackendSession, width: int) -> None:
        """Copy the state where it is due."""
        due = width > 1 or self._wide or self._single >= EVERY
        self._wide = width > 1
        self._single = 0 if due else self._single + 1
        known = self._saved and np.array_equal(self._saved[-1].lengths, self._taken)
        if not due or known or not self._taken.any():
            return
        self._saved.append(_Saved(self._taken.copy(), self._snapshot(backend)))
        if len(self._saved) > SNAPSHOTS:
            ends = [int(s.lengths[s.lengths < _NEVER].sum()) for s in self._saved]
            gaps = {
                i: ends[i + 1] - (ends[i - 1] if i else 0)
                for i in range(SNAPSHOTS)
                if not self._saved[i].pinned
            }
            del self._saved[min(gaps, key=gaps.__getitem__)]

    def pin(self, backend: BackendSession) -> None:
        """Nothing before what is held now will be run again: rows go back to here, or to nothing."""
        self._saved = [_Saved(self._taken.copy(), self._snapshot(backend), pinned=True)]
        self._before = self._noted = None

    def _snapshot(self, backend: BackendSession) -> Any:
        """A copy of the state, whose time counts."""
        start = time.perf_counter()
        found = backend.snapshot()
        self._copies += 1
        self._seconds += time.perf_counter() - start
        return found

    def after(self, tokens: Ints, positions: Ints, extra: Arrays) -> None:
        """Note what a call [B,T] added to the state; position -1 is padding."""
        self._log.note(tokens, positions)
        operands = {name: array for name, array in extra.items() if name.startswith(TAKEN)}
        if self._before is not None and operands:
            self._noted = _Noted(self._before, positions, operands)
        self._taken += (positions >= 0).sum(1)

    def edit(self, calls: Calls, start: int, stop: int, tokens: Any, row: int) -> Logits:
        """See `Session.edit`."""
        return run_anew(calls, self._log, start, stop, tokens, row)

    def select(self, rows: Ints) -> None:
        """See SessionObserver. The copies of the state stay as they are until a row goes back to one."""
        super().select(rows)
        self._before = self._noted = None
        for saved in self._saved:
            saved.lengths = saved.lengths[rows]
            saved.rows = rows if saved.rows is None else saved.rows[rows]

    def join(self, backend: BackendSession, other: Self) -> None:
        """See SessionObserver. Copies of the state go, but for what cannot be run again: a rewind runs all tokens of a
        row again behind it, or goes back to a later copy.
        """
        self._saved = _both(self._pinned, self._taken.size, other._pinned, other._taken.size)
        super().join(backend, other)
        self._before = self._noted = None
        self._wide = True  # a copy is due before the next call

    @property
    def _pinned(self) -> _Saved | None:
        return next((saved for saved in self._saved if saved.pinned), None)

    def copy(self) -> Self:
        """See SessionObserver. The copies of the state, which nobody writes, are shared."""
        other = super().copy()
        other._copies, other._seconds = 0, 0.0
        other._before = other._noted = None
        other._saved = [_Saved(s.lengths.copy(), s.state, s.pinned, s.rows) for s in self._saved]
        return other

    def numbers(self, backend: BackendSession) -> Arrays:
        """See SessionObserver. With the copies of the state, so that a rewind costs what it did."""
        found = super().numbers(backend)
        found["pinned"] = np.array([saved.pinned for saved in self._saved], np.bool_)
        for i, saved in enumerate(self._saved):
            found[f"{i}/lengths"] = saved.lengths
            found |= {f"{i}/state/{name}": _array(value) for name, value in saved.now.items()}
        return found

    def restore(self, backend: BackendSession, numbers: Arrays, lengths: Ints) -> None:
        """See SessionObserver."""
        super().restore(backend, numbers, lengths)
        self._saved = []
        for i, pinned in enumerate(numbers["pinned"].tolist()):
            start = f"{i}/state/"
            state = {n[len(start) :]: a for n, a in numbers.items() if n.startswith(start)}
            self._saved.append(_Saved(numbers[f"{i}/lengths"], state, pinned))


def _both(first: _Saved | None, mine: int, second: _Saved | None, its: int) -> list[_Saved]:
    """The pinned copies of two sessions, of `mine` and `its` rows, as one of all; none where neither has one."""
    lengths, rows, states, start = list[Ints](), list[Ints](), list[Any](), 0
    for saved, count in ((first, mine), (second, its)):
        if saved is None:
            lengths.append(np.full(count, _NEVER))
            rows.append(np.zeros(count, np.int64))  # any, since none goes back to it
        else:
            lengths.append(saved.lengths)
            rows.append(start + np.arange(count))
            states.append(saved.now)
            start += count
    if not states:
        return []
    state = {name: np.concatenate([_array(one[name]) for one in states]) for name in states[0]}
    return [_Saved(np.concatenate(lengths), state, True, np.concatenate(rows))]


def _array(value: Any) -> npt.NDArray[Any]:
    """A value of a snapshot, which may lie on a device."""
    return np.asarray(value.cpu() if hasattr(value, "cpu") else value)
