"""Batches whose rows take different numbers of tokens in a call: flat calls, watched, and generations of eight rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from accel.ir.axis import find_axes
from accel.ir.entries.flat import FLAT, OWNER
from accel.runtime.backends.eager import EagerSession
from accel.runtime.backends.onnx.session import OrtSession
from accel.runtime.decode.row import Row
from accel.runtime.session import flat

from .draft_case import GREEDY, plain, speculated

LIMITS = (24, 5, 24, 1, 17, 24, 9, 24)
Given = dict[str, Any]


def tables(name: str, more: Any = None) -> dict[str, Any]:
    return {"batch": {"use": name, **find_axes()["batch"].small(name)}, **(more or {})}


def watched(patch: Any, on: bool, change: Callable[[Given], Given] | None = None) -> list[Given]:
    """Let every call with padding be flat, or none; what flat calls are given, each changed by `change`. Rows without
    tokens keep every bit of their state.
    """
    patch.setattr(flat, "SHARE", 0.999 if on else 0.0)
    seen: list[Given] = []
    for kind in (EagerSession, OrtSession):

        def part(self: Any, entry: str, given: Given, plain: Any = kind.part) -> Any:
            if entry != FLAT.name:
                return plain(self, entry, given)
            seen.append(given)
            rest = np.setdiff1d(np.arange(len(given["slots"])), given[OWNER][:, 0])
            own = {n: a for n, a in self.buffers().items() if len(a) == len(given["slots"])}
            before = {n: a[rest].copy() for n, a in own.items()}
            found = plain(self, entry, {**given, **(change(given) if change else {})})
            for name, held in before.items():
                np.testing.assert_array_equal(self.buffers()[name][rest], held)
            return found

        patch.setattr(kind, "part", part)
    return seen


def to_the_next_row(given: Given) -> Given:
    """The last token of the first row that has some is the next row's."""
    owner, rows = given[OWNER].copy(), len(given["slots"])
    ends = np.flatnonzero(np.diff(owner[:, 0]) > 0)
    if not ends.size:
        return {OWNER: np.stack(((owner[:, 0] + 1) % rows, owner[:, 1]), axis=1)}
    last = int(ends[0])
    owner[last + 1 :][owner[last + 1 :, 0] == owner[last, 0] + 1, 1] += 1
    owner[last] = [owner[last, 0] + 1, 0]
    return {OWNER: owner}


def prompts() -> list[Any]:
    """Eight of different lengths; every second one repeats itself."""
    rng, found = np.random.default_rng(4), []
    for size in range(9, 17):
        each = np.tile(rng.integers(3, 50, 5), 4)[:size]
        found.append(each if size % 2 else rng.integers(3, 50, size))
    return found


def batch(order: Sequence[int], eos: Sequence[int] = ()) -> list[Row]:
    """Rows of some of the prompts, which end after different numbers of tokens, one of them where its context does."""
    texts = prompts()
    return [
        Row(
            texts[i],
            GREEDY,
            np.random.default_rng(0),
            limit=LIMITS[i],
            max_context=texts[i].size + 7 if i == 5 else 1000,
            eos=eos,
        )
        for i in order
    ]


def session_of(model: Any, rows: int) -> Any:
    """A session of any number of rows."""
    session = model.session()
    session.select([0] * rows)
    return session


def generated(model: Any, order: Sequence[int], eos: Sequence[int], **how: Any) -> list[Row]:
    """The rows, whose tokens were drafted in one batch."""
    rows = batch(order, eos)
    with session_of(model, len(rows)) as session:
        list(speculated(session, rows, **how))
        for row, length in zip(rows, session.lengths, strict=True):
            assert length == row.prompt.size + max(0, len(row.tokens) - 1)
    return rows


def law(model: Any, monkeypatch: Any, change: Any = None, **how: Any) -> list[Row]:
    """Eight rows get what each gets alone without drafts, whether calls are padded or flat, in any order. The rows."""
    with monkeypatch.context() as patch:
        watched(patch, False)
        free = plain(session_of(model, 8), batch(range(8)))
        eos = (free[2][6], free[7][3])
        alone = [plain(model.session(), batch([i], eos))[0] for i in range(8)]
        padded = generated(model, range(8), eos, **how)
    with monkeypatch.context() as patch:
        seen = watched(patch, True, change)
        rows = generated(model, range(8), eos, **how)
        order = [5, 0, 7, 2, 1, 6, 4, 3]
        permuted = generated(model, order, eos, **how)
    assert [row.tokens for row in padded] == alone
    assert [row.tokens for row in rows] == alone
    assert [row.tokens for row in permuted] == [alone[i] for i in order]
    assert {row.finish for row in rows} == {"eos", "length", "context"}
    assert len(seen) > 10, "calls are padded: nothing is tested"
    counts = {tuple(np.bincount(given[OWNER][:, 0], minlength=8)) for given in seen}
    assert any(0 in each and max(each) > 2 for each in counts), (
        "nothing is drafted after a row ended"
    )
    return rows
