"""Tokens that can be edited: what follows is moved to its new positions, not computed again."""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np

from accel.ir.entries.blend import EARLY
from accel.ir.entries.shift import SHIFT, keys_of, turned_of
from accel.ir.errors import InputError
from accel.ir.state import POSITIONS, Part, name_of
from accel.runtime.backends.protocol import BackendSession
from accel.runtime.call import Arrays, Logits
from accel.runtime.inputs.ints import Ints, as_ints, check_vocabulary
from accel.runtime.inputs.prompts import as_count
from accel.runtime.rows import ByRow
from accel.runtime.session.observers.observer import (
    Calls,
    CallWatcher,
    Capabilities,
    ModelParts,
    ObserverFactory,
    SessionObserver,
)
from accel.runtime.session.observers.token_log import Log


class Edits(SessionObserver, CallWatcher):
    """Which tokens the rows hold, and how some of them become others. The i-th slot of a row holds token i."""

    log: Annotated[Log, ByRow(name="")]

    capabilities = Capabilities(trees=False)

    def __init__(self, batch: int):
        self.log = Log(batch)

    @classmethod
    def for_model(cls, model: ModelParts) -> ObserverFactory | None:
        """Where keys can be rotated to other positions (`kv.reuse = pie`)."""
        alone = SHIFT.name in model.entries and EARLY not in model.entries
        return ObserverFactory(cls) if alone else None

    def after(self, tokens: Ints, positions: Ints, extra: Arrays) -> None:
        """See SessionObserver."""
        self.log.note(tokens, positions)

    def edit(self, calls: Calls, start: int, stop: int, tokens: Any, row: int) -> Logits:
        """See `Session.edit`."""
        backend, lengths = calls.backend, calls.lengths.copy()
        ids = _checked(calls, start, stop, tokens, row)
        length, delta = int(lengths[row]), start + len(ids) - stop
        if length + delta == 0:
            raise InputError(f"the edit would leave nothing of row {row}; use rewind(0)")
        before = _slots_of(backend, row, start, length)
        after = {
            n: a[..., stop - start :] if a.ndim == 1 else a[:, stop - start :]
            for n, a in before.items()
        }
        last = self.log.ids[row, length - 1 if stop < length else start - 1]
        held = self.log.ids[row, start:length].copy()
        behind = held[stop - start :]
        moved = _moved(backend, after, delta)
        try:
            calls.set_length(row, start)
            logits = _append(calls, row, ids) if len(ids) else None
            if logits is None or stop < length:
                calls.need([length + delta])
                _put(backend, row, start + len(ids), moved)
                self.log.put(row, start + len(ids), behind)
                calls.set_length(row, length + delta - 1)
                logits = _append(calls, row, np.array([last]))
        except BaseException:
            _put(calls.backend, row, start, before)
            self.log.put(row, start, held)
            calls.lengths = lengths
            raise
        return logits


def run_anew(calls: Calls, log: Log, start: int, stop: int, tokens: Any, row: int) -> Logits:
    """As `Session.edit`, by running all tokens of a row from `start` on: exact. `log`: what rows hold."""
    lengths = calls.lengths
    ids = _checked(calls, start, stop, tokens, row)
    held = log.ids[row, : int(lengths[row])].copy()
    new = np.concatenate([held[:start], ids, held[stop:]])
    if not new.size:
        raise InputError(f"the edit would leave nothing of row {row}; use rewind(0)")
    first = min(start, new.size - 1)  # the last token has the logits
    back = lengths.copy()
    back[row] = first
    calls.rewind(back)
    try:
        return _append(calls, row, new[first:])
    except BaseException:
        log.put(row, 0, held)
        calls.lengths = lengths
        raise


def _checked(calls: Calls, start: int, stop: int, tokens: Any, row: int) -> Ints:
    """The new tokens [n], checked like the rest."""
    for name, value in (("start", start), ("stop", stop), ("row", row)):
        as_count(value, name, 0)
    if not 0 <= row < calls.batch:
        raise InputError(f"row is {row}; this session has rows 0..{calls.batch - 1}")
    length = int(calls.lengths[row])
    if not 0 <= start <= stop <= length:
        raise InputError(
            f"start = {start} and stop = {stop} are not a span of row {row}, which holds {length} tokens; give "
            f"0 <= start <= stop <= {length}"
        )
    ids = as_ints(tokens, "tokens") if np.size(tokens) else np.zeros(0, np.int64)
    if ids.ndim != 1:
        raise InputError(f"tokens have shape {list(ids.shape)}; an edit of one row takes [n]")
    check_vocabulary(ids, calls.token_ids, "tokens")
    if (after := length + start + len(ids) - stop) > calls.max_context:
        raise InputError(
            f"row {row} would hold {after} tokens; max_context is {calls.max_context}. Give fewer tokens"
        )
    return ids


def _append(calls: Calls, row: int, ids: Ints) -> Logits:
    """Run tokens [n] of one row."""
    tokens, counts = np.zeros((calls.batch, len(ids)), np.int64), np.zeros(calls.batch, np.int64)
    tokens[row], counts[row] = ids, len(ids)
    return calls.run(tokens, counts, last_only=True)


def _moved(backend: BackendSession, after: Arrays, delta: int) -> Arrays:
    """Keys [G,S,D] rotated by `delta` positions; values as they are."""
    count = len(after.get(POSITIONS, ()))
    if not delta or not count:
        return after
    keys = {i: name_of(Part.KEYS, i) for i in range(len(after))}
    keys = {i: name for i, name in keys.items() if name in after}
    inputs: Arrays = {keys_of(i): after[name][None] for i, name in keys.items()}
    inputs["delta"] = np.full((1, count), delta)
    turned = backend.part(SHIFT.name, inputs)
    return {**after, **{name: turned[turned_of(i)][0] for i, name in keys.items()}}


def _slots_of(backend: BackendSession, row: int, start: int, stop: int) -> Arrays:
    """A copy of what a row's slots hold, without axis B."""
    buffers = backend.buffers()
    return {
        n: (a[row][start:stop] if a.ndim == 2 else a[row][:, start:stop]).copy()
        for n, a in buffers.items()
    }


def _put(backend: BackendSession, row: int, start: int, arrays: Arrays) -> None:
    """Let a row's slots from `start` on hold these, at the positions that they now have."""
    buffers = backend.buffers()
    for name, array in arrays.items():
        if array.ndim == 1:
            buffers[name][row, start : start + len(array)] = np.arange(start, start + len(array))
        else:
            buffers[name][row, :, start : start + array.shape[1]] = array
