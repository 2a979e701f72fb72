"""Prompts that run entry by entry: calls of one, and which tokens go on to the next."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from accel.ir.prefill import Pick
from accel.runtime.backends.protocol import BackendSession
from accel.runtime.inputs.ints import Ints

Scores = npt.NDArray[np.float32]


def picks(plan: Pick, scores: Scores) -> Ints:
    """Which of the tokens that are worth `scores` [n] stay, in order: the newest, then the first, then the
    best; of equals the earlier. What is no number is worth least.
    """
    count = scores.size
    if count <= plan.tokens:
        return np.arange(count)
    worth = np.nan_to_num(scores.astype(np.float64), nan=-np.finfo(np.float64).max)
    worth[: plan.sinks] = np.inf
    rank = np.argsort(-worth, kind="stable")
    late = rank >= count - plan.recent
    rank = np.concatenate([np.sort(rank[late])[::-1], rank[~late]])
    return np.sort(rank[: plan.tokens])


class Part:
    """One entry over prompts, whose tokens have these positions [B,K] (-1: padding) of `counts` [B]."""

    def __init__(
        self, entry: str, backend: BackendSession, positions: Ints, counts: Ints, chunk: int
    ):
        self.calls = 0
        self._entry, self._backend, self._chunk = entry, backend, chunk
        self._positions, self._counts = positions, counts

    def run(self, inputs: dict[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
        """`stream`: of all columns; anything else: of the call that a row's last token is in."""
        found: dict[str, npt.NDArray[Any]] = {}
        streams = []
        left = (self._positions >= 0).sum(1)
        for start in range(0, int(left.max()), self._chunk):
            columns = slice(start, min(start + self._chunk, int(left.max())))
            out = self._call({n: a[:, columns] for n, a in inputs.items()}, columns, left)
            if "stream" in out:
                streams.append(out.pop("stream"))
            ends = (left > start) & (left <= columns.stop)
            for name, array in out.items():
                found.setdefault(name, np.zeros_like(array))
                found[name][ends] = array[ends]
        return {**found, **({"stream": np.concatenate(streams, axis=1)} if streams else {})}

    def _call(
        self, inputs: dict[str, npt.NDArray[Any]], columns: slice, left: Ints
    ) -> dict[str, npt.NDArray[Any]]:
        positions = self._positions[:, columns]
        width = positions.shape[1]
        rows = np.clip(left - columns.start - 1, 0, width - 1)[:, None]
        slots = np.where(positions[:, 0] >= 0, positions[:, 0], self._counts)
        self.calls += 1
        place = {"positions": positions, "slots": slots, "rows": rows}
        return self._backend.part(self._entry, {**inputs, **place})


def taken(
    values: npt.NDArray[Any], picked: list[Ints], fill: int = 0
) -> tuple[npt.NDArray[Any], Ints]:
    """Each row's picked columns of values [B,T,…], on the left, and how many they are [B]."""
    left = np.array([p.size for p in picked])
    found = np.full((len(values), max(1, int(left.max())), *values.shape[2:]), fill, values.dtype)
    for row, value, places in zip(found, values, picked, strict=True):
        row[: places.size] = value[places]
    return found, left
