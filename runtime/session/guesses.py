"""Trees of guesses: a call of which a path may be kept."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from accel.ir.errors import InputError, shown
from accel.runtime.call import Logits
from accel.runtime.inputs.calls import call_tokens, columns_of, path_of, positions_of, tree_of
from accel.runtime.inputs.ints import Bools, Ints
from accel.runtime.session.core import SessionCore


@dataclass(frozen=True, eq=False)
class _Tree:
    """Tokens [B,T] that may be kept, what each sees of them, at which positions from the first on they lie [B,T], and
    how many of a row are real [B].
    """

    tokens: Ints
    seen: Bools
    depths: Ints
    counts: Ints


class Guesses:
    """The last tree of a session, until a path of it is kept or it is dropped."""

    def __init__(self, core: SessionCore):
        self._core = core
        self._tree: _Tree | None = None

    def run(
        self,
        tokens: Any,
        tree: Any,
        lengths: Any,
        columns: Any,
        positions: Any,
        controls: Mapping[str, Any],
    ) -> Logits:
        """See `Session.guess`."""
        core, before = self._core, self._core.lengths
        ids, counts = call_tokens(tokens, lengths, before, core.token_ids, core.max_context)
        seen = tree_of(tree, ids.shape, ahead=positions is not None)
        rows = columns_of(columns, ids.shape)
        if ids.shape[1] > core.chunk:
            raise InputError(
                f"a tree of {ids.shape[1]} tokens is too large; give at most {core.chunk}"
            )
        full = np.full(core.batch, ids.shape[1], np.int64) if counts is None else counts
        real = np.arange(ids.shape[1]) < full[:, None]
        places = positions_of(positions, before, real, seen)
        core.begin_tree(ids, full, controls)
        try:
            core.catch_up()
            slots = before - core.base
            core.make_room(slots, ids.shape[1])
            # from here on something may be written
            self._tree = _Tree(ids, seen, places - before[:, None], full)
            return core.step(ids, places, slots, rows, int(full.sum()), seen)
        except BaseException as error:
            core.undo(before, error)
            raise

    def keep(self, paths: Any) -> None:
        """See `Session.keep`."""
        core, backend, tree = self._core, self._core.backend, self._tree
        if tree is None:
            raise InputError("no tree to accept from; call session.guess first")
        if not hasattr(paths, "__len__") or len(paths) != core.batch:
            told = f"{len(paths)} paths" if hasattr(paths, "__len__") else f"paths = {shown(paths)}"
            raise InputError(f"keep was given {told}; give one for each row, {core.batch}")
        chosen = [
            path_of(p, tree.seen, tree.depths, b, int(tree.counts[b])) for b, p in enumerate(paths)
        ]
        width, before = tree.tokens.shape[1], core.lengths
        path = np.tile(np.arange(width), (core.batch, 1))
        positions = np.full((core.batch, width), -1, np.int64)
        tokens = np.zeros((core.batch, max(1, *(c.size for c in chosen))), np.int64)
        for b, columns in enumerate(chosen):
            path[b, : columns.size] = columns
            positions[b, : columns.size] = before[b] + np.arange(columns.size)
            tokens[b, : columns.size] = tree.tokens[b, columns]
        start = time.perf_counter()
        slots = before - core.base
        backend.part("commit", {"slots": slots, "path": path, "positions": positions})
        core.count(0, 0, start)
        self._tree = None
        kept = np.array([c.size for c in chosen], np.int64)
        width = tokens.shape[1]
        core.end_tree(tokens, positions[:, :width], path[:, :width], before + kept)

    def drop(self) -> None:
        """Forget a tree of which nothing was kept."""
        if self._tree is not None:
            self.keep([()] * self._core.batch)
