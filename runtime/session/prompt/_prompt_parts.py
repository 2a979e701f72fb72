"""Prompts that run entry by entry: calls of one, and which tokens go on to the next."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from accel.ir.entries.compress import is_queries
from accel.ir.prefill import Pick
from accel.ir.sizes import FEW
from accel.runtime.backends.protocol import BackendSession
from accel.runtime.call import Arrays
from accel.runtime.inputs.ints import Bools, Ints

Scores = npt.NDArray[np.float32]


def picks(plan: Pick, scores: Scores, count: int | None = None) -> Ints:
    """Which of the tokens with these scores [n] stay, in order: the newest, then the first, then the
    best; of equals the earlier. What is no number is the lowest. `count`: tokens of the whole prompt, of which
    these are left; None: all are.
    """
    most = plan.tokens_kept(scores.size if count is None else count)
    if scores.size <= most:
        return np.arange(scores.size)
    worth = np.nan_to_num(scores.astype(np.float64), nan=-np.finfo(np.float64).max)
    worth[: plan.sinks] = np.inf
    rank = np.argsort(-worth, kind="stable")
    late = rank >= scores.size - plan.recent
    rank = np.concatenate([np.sort(rank[late])[::-1], rank[~late]])
    return np.sort(rank[:most])


class Part:
    """One entry over prompts, whose tokens have these positions [B,K] (-1: padding) of `counts` [B].

    `observe`: number of last queries that its scores are computed from, 0: all; None: it gives logits, of the
    last token. `listen`: is told the queries of each call and their positions, where the entry gives them.
    """

    def __init__(
        self,
        entry: str,
        backend: BackendSession,
        positions: Ints,
        counts: Ints,
        chunk: int,
        observe: int | None = None,
        listen: Callable[[Arrays, Ints], None] = lambda *_: None,
    ):
        self.calls = 0
        self._entry, self._backend, self._chunk = entry, backend, chunk
        self._positions, self._counts = positions, counts
        self._left = (positions >= 0).sum(1)
        self._observe, self._listen = observe, listen

    def run(self, inputs: Arrays, before: Scores | None = None) -> Arrays:
        """`stream_out`: of all columns; anything else: of the call that a row's last token is in. `before` [B,A]:
        scores of the tokens so far, of the earlier parts.

        A row's last call begins early enough for all the queries that are observed, and for more tokens than choose
        what they read (`kv.select`); the one before ends there.
        """
        outputs: Arrays = {}
        stream: npt.NDArray[Any] | None = None
        left = self._left
        if before is None:
            before = np.zeros((left.size, 1), np.float32)
        longest, final = int(left.max()), (left - 1) // self._chunk * self._chunk
        least = FEW + 1 if self._chunk > 2 * FEW else 1
        early = np.minimum(final, left - max(self._observe or 1, least)).clip(min=0)
        for start in range(0, longest, self._chunk):
            ends = (left > 0) & (final == start)
            first = np.where(ends, early, start)
            end = np.where(ends, left, np.minimum(start + self._chunk, early))
            width = max(1, int((end - first).max()))
            columns = first[:, None] + np.arange(width)
            out = self._call(inputs, columns, columns < end[:, None], ends, before)
            if "stream_out" in out:
                made = out.pop("stream_out")
                if stream is None:
                    stream = np.zeros((left.size, longest, made.shape[2]), made.dtype)
                for row, (a, b) in enumerate(zip(first, end, strict=True)):
                    stream[row, a : max(a, b)] = made[row, : max(0, b - a)]
            before = out.get("scores", before)
            for name, array in out.items():
                outputs.setdefault(name, np.zeros_like(array))
                outputs[name][ends] = array[ends]
        return outputs if stream is None else {**outputs, "stream_out": stream}

    def _call(
        self, inputs: Arrays, columns: Ints, real: Bools, ends: Bools, before: Scores
    ) -> Arrays:
        """One call of these columns [B,T] of each row, of which some are `real`; rows that end in it."""
        inside = np.minimum(columns, self._positions.shape[1] - 1)
        rows = np.arange(len(columns))[:, None]
        positions = np.where(real, self._positions[rows, inside], -1)
        slots = np.where(positions[:, 0] >= 0, positions[:, 0], self._counts)
        last = (self._left - 1 - columns[:, 0])[:, None]
        if self._observe is None:
            wanted = np.clip(last, 0, columns.shape[1] - 1)
        else:
            wanted = last - np.arange(self._observe or 1)[::-1]
            wanted = np.where(ends[:, None] & (wanted >= 0), wanted, -1)
        self.calls += 1
        place = {"positions": positions, "slots": slots, "rows": wanted, "before": before}
        given = {n: a[rows, inside] for n, a in inputs.items()} | place
        out = self._backend.part(self._entry, given)
        queries = {n: out.pop(n) for n in list(out) if is_queries(n)}
        self._listen(queries, positions)
        return out


def taken(
    values: npt.NDArray[Any], picked: list[Ints], fill: int = 0
) -> tuple[npt.NDArray[Any], Ints]:
    """Each row's picked columns of values [B,T,…], on the left, and how many they are [B]."""
    left = np.array([p.size for p in picked])
    found = np.full((len(values), max(1, int(left.max())), *values.shape[2:]), fill, values.dtype)
    for row, value, places in zip(found, values, picked, strict=True):
        row[: places.size] = value[places]
    return found, left
