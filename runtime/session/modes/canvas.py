"""What a session knows of a model that sees both ways: tokens are written over while those around them stay."""

from __future__ import annotations

from typing import Any

import numpy as np

from accel.ir.diffusion import Diffusion
from accel.ir.errors import InputError
from accel.runtime.call import Logits
from accel.runtime.inputs.calls import call_tokens
from accel.runtime.inputs.ints import Ints, as_ints
from accel.runtime.rows import PerRow
from accel.runtime.session.observers.observer import (
    Calls,
    Capabilities,
    ModelParts,
    ObserverFactory,
    PromptRunner,
    SessionObserver,
)


class CanvasState(SessionObserver, PromptRunner):
    """Slots that may be in sight. The i-th slot of a row holds token i, and its tokens see those after them too.

    What a token is to others, its keys and values, is of when it was last written: `write` tells those of a call
    what the row holds at that time, and those outside of it nothing. A call is never cut, so that its tokens see
    each other.
    """

    filled: PerRow  # tokens, and those forgotten since

    rewrites = True
    capabilities = Capabilities(width=1, chunks=False)  # rows of a call see each other

    def __init__(self, diffusion: Diffusion | None, batch: int):
        self.diffusion = diffusion
        self.filled = np.zeros(batch, np.int64)

    @classmethod
    def for_model(cls, model: ModelParts) -> ObserverFactory | None:
        """Of models that fill masks, and of those that embed and see both ways."""
        facts = model.facts
        return ObserverFactory(lambda n: cls(facts.diffusion, n)) if facts.both_ways else None

    def write(self, calls: Calls, tokens: Any, start: Any, lengths: Any, rows: Any) -> Logits:
        """See `Session.write`."""
        before = calls.lengths
        first = np.broadcast_to(as_ints(start, "start"), before.shape)
        if (bad := (first < 0) | (first > before)).any():
            row = int(bad.argmax())
            raise InputError(
                f"start of row {row} is {first[row]}, but the row holds {before[row]} tokens; give "
                f"0..{before[row]}"
            )
        ids, real = call_tokens(tokens, lengths, first, calls.vocab_size, calls.max_context)
        counts = np.full(calls.batch, ids.shape[1], np.int64) if real is None else real
        after = np.maximum(before, first + counts)
        if (bad := (counts < ids.shape[1]) & (first + counts < after)).any():
            row = int(bad.argmax())
            raise InputError(
                f"row {row} has {ids.shape[1] - counts[row]} padding columns in front of tokens that it holds "
                f"({first[row] + counts[row]} of {after[row]}); give as many tokens as the call is wide, or up to "
                "its end"
            )
        return self._written(calls, ids, first, counts, after, rows)

    def run(
        self, calls: Calls, tokens: Ints, counts: Ints | None, last_only: bool, prompt: bool
    ) -> Logits:
        """See SessionObserver: tokens behind those that each row holds; padding gets logits 0."""
        width, before = tokens.shape[1], calls.lengths
        full = np.full(calls.batch, width, np.int64) if counts is None else counts
        rows = np.maximum(full - 1, 0)[:, None] if last_only else None
        logits = self._written(calls, tokens, before, full, before + full, rows)
        if counts is not None:
            empty = counts[:, None] == 0 if last_only else np.arange(width) >= counts[:, None]
            logits[np.broadcast_to(empty, logits.shape[:2])] = 0
        return logits

    def _written(
        self, calls: Calls, ids: Ints, first: Ints, counts: Ints, after: Ints, rows: Any
    ) -> Logits:
        """One graph call, after one of padding where what rows have forgotten would stay in sight."""
        width, before = ids.shape[1], calls.lengths
        columns = np.arange(width)
        if rows is None:
            rows = np.broadcast_to(columns, ids.shape)
        else:
            rows = _columns(rows, calls.batch, width)
        if (self.filled > np.maximum(after, first + width)).any():
            blank = np.zeros((calls.batch, int((self.filled - before).max())), np.int64)
            calls.step(blank, blank - 1, before, blank[:, :1], 0)
        positions = np.where(columns < counts[:, None], first[:, None] + columns, -1)
        logits = calls.step(ids, positions, first, rows, int(counts.sum()))
        calls.lengths = self.filled = after
        return logits


def _columns(rows: Any, batch: int, width: int) -> Ints:
    """Which columns get logits, checked, [B,N]."""
    found = as_ints(rows, "rows")
    if found.ndim != 2 or len(found) != batch or not found.size:
        raise InputError(
            f"rows have shape {list(found.shape)}; give [{batch}, N] columns of the call"
        )
    if int(found.min()) < 0 or int(found.max()) >= width:
        raise InputError(
            f"rows name columns {found.min()}..{found.max()} of a call of {width}; give 0..{width - 1}"
        )
    return found
