"""What a session does to a prompt before it runs: the tokens that a recipe's filter leaves of it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from accel.ir.prefill import Filter, Prefill
from accel.runtime.ints import Ints
from accel.runtime.stepper import Stepper

Scores = npt.NDArray[np.float32]


def filtered(
    plan: Filter, open_stepper: Callable[[], Stepper], ids: Ints, counts: Ints | None, chunk: int
) -> tuple[Ints, Ints, int]:
    """What is left of prompts [B,T], of which `counts` [B] tokens (None: all) are real: ids [B,K], how many
    of a row are real [B], and the graph calls that it took, each of at most `chunk` columns.
    """
    if counts is None:
        counts = np.full(len(ids), ids.shape[1], np.int64)
    if int(counts.max()) <= plan.tokens:
        return ids, counts, 0
    stepper = open_stepper()
    try:
        worth, calls = _worth(stepper, ids, counts, chunk)
    finally:
        stepper.close()
    picked = [picks(plan, scores) for scores in worth]
    left = np.array([p.size for p in picked])
    found = np.zeros((len(ids), int(left.max())), np.int64)
    for row, tokens, places in zip(found, ids, picked, strict=True):
        row[: places.size] = tokens[places]
    return found, left, calls


def picks(plan: Filter, scores: Scores) -> Ints:
    """The positions that stay of a prompt whose tokens are worth `scores` [n], in order: the newest,
    then the first, then the best; of equals the earlier. What is no number is worth least.
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


def unseen(plan: Prefill | None, count: int) -> int:
    """How many of a prompt's `count` tokens the model does not see."""
    return 0 if plan is None or plan.filter is None else max(0, count - plan.filter.tokens)


def _worth(
    stepper: Stepper, ids: Ints, counts: Ints, chunk: int
) -> tuple[list[Scores], int]:
    """What each row's last query makes of its tokens, and the graph calls that it took."""
    longest = int(counts.max())
    stepper.resize(-(-longest // chunk) * chunk)
    worth = [np.zeros(0, np.float32) for _ in ids]
    for start in range(0, longest, chunk):
        part = ids[:, start : min(start + chunk, longest)]
        columns, left = np.arange(part.shape[1]), counts - start
        positions = np.where(columns < left[:, None], start + columns, -1)
        ends = (left > 0) & (left <= part.shape[1])
        rows = np.where(ends, left - 1, 0)[:, None]
        found = stepper.step(part, positions, np.minimum(counts, start), rows)
        for row in np.flatnonzero(ends):
            worth[row] = found[row, 0, : counts[row]].copy()
    return worth, -(-longest // chunk)
