"""Requests of a language that is a table, decoded by a drafter: their tokens, and the calls that they took."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import numpy as np

from accel.ir.axis import Axis
from accel.runtime.decode.context import DecodeContext
from accel.runtime.sample.standard import Standard
from accel.runtime.tree import NONE
from accel.runtime.verify import Chance, Target

from .draft_case import rows_of

SIZE = 60
GREEDY = Standard()


@lru_cache(maxsize=16)
def language(seed: int) -> np.ndarray:
    """What follows two tokens: logits [V,V,V]."""
    table = np.random.default_rng(seed).standard_normal((SIZE, SIZE, SIZE), np.float32)
    return 3 * table


def plain(prompts: Sequence[Any], sampler: Any = GREEDY, seed: int = 0) -> list[list[int]]:
    rows = rows_of(prompts, sampler)
    for row in rows:
        while not row.finish:
            row.accept(row.pick(language(seed)[*row.seen[-2:]]), None)
    return [row.tokens for row in rows]


def decode(
    method: Any,
    prompts: Sequence[Any],
    sampler: Any = GREEDY,
    *,
    store: Any = None,
    seed: int = 0,
    limit: int = 24,
    most: int = 6,
    watch: Callable[[Any], None] = lambda tree: None,
    **axes: str,
) -> tuple[list[list[int]], int]:
    """Each row's tokens, and how many calls checked or gave them."""
    rows, calls = rows_of(prompts, sampler, limit=limit), 0
    asked = {"verify": "sample-match", **method.asks, **axes}
    methods = {axis: Axis(axis, f"accel.runtime.{axis}").build(use) for axis, use in asked.items()}
    session: Any = SimpleNamespace(vocab_size=SIZE, batch=len(rows))
    drafters = method.open(session, rows, DecodeContext(methods, store=store))
    while live := [i for i, row in enumerate(rows) if not row.finish]:
        limits = {i: min(most, rows[i].left - 1) for i in live if rows[i].left > 1}
        drafts = drafters.draft(limits, lambda *_: True) if limits else {}
        calls += 1
        for i in live:
            row, tree = rows[i], drafts.get(i, NONE)
            watch(tree)
            assert len(tree) <= limits.get(i, 0)
            paths = [(), *(tree.tokens[list(tree.path(n))].tolist() for n in range(len(tree)))]
            before = np.array([[*row.seen[-2:].tolist(), *path][-2:] for path in paths])
            logits = language(seed)[before[:, 0], before[:, 1]]
            verdict = methods["verify"](
                Target(tree, logits, row.seen, row.sampler), Chance(row.rng)
            )
            drafters.observe(i, tree, verdict, logits)
            for token in (*tree.tokens[list(verdict.path)].tolist(), verdict.token):
                if not row.finish:
                    row.accept(token, None)
    drafters.close()
    return [row.tokens for row in rows], calls
