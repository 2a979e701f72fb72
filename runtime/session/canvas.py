"""Sessions of a model that sees both ways: tokens are written over while those around them stay."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np

from accel.ir.diffusion import Diffusion
from accel.ir.errors import InputError
from accel.runtime.backends.protocol import Logits, Stepper
from accel.runtime.inputs.ints import Ints, as_ints
from accel.runtime.session.edits import EditableSession
from accel.runtime.session.observers.observer import Capabilities
from accel.runtime.session.rows import Kin, wanted_rows
from accel.runtime.session.session import Session
from accel.runtime.session.validate import call_tokens, check_no_plan


def session_kind(entries: Iterable[str], diffusion: Diffusion | None) -> Callable[..., Session]:
    """The class of a model's sessions, by its entries and by whether it fills masks."""
    if diffusion is not None:
        return partial(CanvasSession, diffusion=diffusion)
    return EditableSession if "shift" in entries else Session


class CanvasSession(Session):
    """See `Session`; of a model whose tokens see those after them too. The i-th slot of a row holds token i.

    What a token is to others, its keys and values, is of when it was last written: `write` tells those of a call
    what the row holds at that time, and those outside of it nothing. A call is never cut, so that its tokens see
    each other.
    """

    def __init__(self, stepper: Stepper, batch: int, *, diffusion: Diffusion, **options: Any):
        super().__init__(stepper, batch, **options)
        self.diffusion = diffusion
        self._filled = (
            self._lengths
        )  # slots of each row that may be in sight: tokens, and those forgotten since

    @property
    def capabilities(self) -> Capabilities:
        """Rows of a call see each other, so that none is what a call of its own would give."""
        return super().capabilities & Capabilities(width=1)

    def write(self, tokens: Any, start: Any, lengths: Any = None, rows: Any = None) -> Logits:
        """Let each row hold tokens [B,T] from position `start` on, an int or [B], and return the logits [B,N,V] of
        columns `rows` [B,N], by default of all. What a row holds before and behind them stays, as it was.

        `lengths` [B], each 0..T: how many are real; the rest, on the right, is padding, and may stand only where
        a row then ends. `start` is at most what the row holds. Raises InputError; after a call that fails
        for another reason the tokens from `start` on are to be written again.
        """
        stepper = self._open()
        first = np.broadcast_to(as_ints(start, "start"), self._lengths.shape)
        if (bad := (first < 0) | (first > self._lengths)).any():
            row = int(bad.argmax())
            raise InputError(
                f"start of row {row} is {first[row]}, and it holds {self._lengths[row]} tokens; give "
                f"0..{self._lengths[row]}"
            )
        ids, real = call_tokens(tokens, lengths, first, self.vocab_size, self.max_context)
        counts = np.full(self.batch, ids.shape[1], np.int64) if real is None else real
        after = np.maximum(self._lengths, first + counts)
        if (bad := (counts < ids.shape[1]) & (first + counts < after)).any():
            row = int(bad.argmax())
            raise InputError(
                f"row {row} has {ids.shape[1] - counts[row]} columns of padding in front of tokens that it holds "
                f"({first[row] + counts[row]} of {after[row]}); give as many tokens as the call is wide, or up to "
                "its end"
            )
        return self._written(stepper, ids, first, counts, after, rows)

    def select(self, rows: Any) -> None:
        """See Session. Tokens anywhere may have been written over, so that all of a row is copied."""
        filled, self._kin = self._filled, Kin.copies(np.arange(self.batch), self._lengths)
        super().select(rows)
        self._filled = filled[wanted_rows(rows, filled.size)]

    def _written(
        self, stepper: Stepper, ids: Ints, first: Ints, counts: Ints, after: Ints, rows: Any
    ) -> Logits:
        """One graph call, after one of padding where what rows have forgotten would stay in sight."""
        columns = np.arange(ids.shape[1])
        rows = (
            np.broadcast_to(columns, ids.shape)
            if rows is None
            else self._columns(rows, ids.shape[1])
        )
        if (self._filled > np.maximum(after, first + ids.shape[1])).any():
            blank = np.zeros((self.batch, int((self._filled - self._lengths).max())), np.int64)
            self._step(stepper, blank, blank - 1, self._lengths, blank[:, :1], 0)
        positions = np.where(columns < counts[:, None], first[:, None] + columns, -1)
        logits = self._step(stepper, ids, positions, first, rows, int(counts.sum()))
        self._lengths = self._filled = after
        return logits

    def _columns(self, rows: Any, width: int) -> Ints:
        """Which columns get logits, checked, [B,N]."""
        found = as_ints(rows, "rows")
        if found.ndim != 2 or len(found) != self.batch or not found.size:
            raise InputError(
                f"rows have shape {list(found.shape)}; give [{self.batch}, N] columns of the call"
            )
        if int(found.min()) < 0 or int(found.max()) >= width:
            raise InputError(
                f"rows name columns {found.min()}..{found.max()} of a call of {width}; give 0..{width - 1}"
            )
        return found

    def _run(
        self,
        tokens: Any,
        lengths: Any,
        last_only: bool,
        run_layers: Any = None,
        threshold: float | None = None,
        segments: Any = None,
    ) -> Logits:
        """See `Session.run`: tokens behind those that each row holds; padding gets logits 0."""
        check_no_plan(run_layers, threshold)
        stepper = self._open()
        ids, real = call_tokens(tokens, lengths, self._lengths, self.vocab_size, self.max_context)
        counts = np.full(self.batch, ids.shape[1], np.int64) if real is None else real
        rows = np.maximum(counts - 1, 0)[:, None] if last_only else None
        logits = self._written(stepper, ids, self._lengths, counts, self._lengths + counts, rows)
        if real is not None:
            empty = (
                counts[:, None] == 0 if last_only else np.arange(ids.shape[1]) >= counts[:, None]
            )
            logits[np.broadcast_to(empty, logits.shape[:2])] = 0
        return logits
