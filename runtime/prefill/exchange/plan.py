"""Who computes what of a prompt, and who sends what to whom: plain data, the same for every layer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from accel.runtime.inputs.ints import Ints

Rows = tuple[int, int]  # start, stop
KEYS, QUERIES, RESULTS = "keys", "queries", "results"


@dataclass(frozen=True)
class Attend:
    """Attention of some rows of the owner's queries over stretches (owner, start, stop) of keys, at one go. It is
    merged into what the rank has of these rows so far.
    """

    owner: int
    rows: Rows
    keys: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class Send:
    """What a rank has, to another: all keys and values of some owners, or rows of one owner's queries or results."""

    to: int
    kind: str
    owners: tuple[int, ...]
    rows: Rows = (0, 0)


@dataclass(frozen=True)
class Receive:
    """The other end. A rank merges results of its own queries into what it has."""

    source: int
    kind: str
    owners: tuple[int, ...]
    rows: Rows = (0, 0)


Step = Attend | Send | Receive


@dataclass(frozen=True)
class Plan:
    """queries: positions of each rank's new tokens. keys: positions of its keys, those of its new tokens first, then
    cached ones, then padding (-1). steps: what each rank does in every layer, in order.
    """

    queries: tuple[Ints, ...]
    keys: tuple[Ints, ...]
    steps: tuple[tuple[Step, ...], ...]

    @property
    def ranks(self) -> int:
        """How many there are."""
        return len(self.queries)

    @property
    def last(self) -> int:
        """The rank of the last token."""
        return int(np.argmax([own.max(initial=-1) for own in self.queries]))

    def cached(self, rank: int) -> Ints:
        """Positions of the cached tokens that a rank holds."""
        held = self.keys[rank][self.queries[rank].size :]
        return held[held >= 0]


@dataclass(frozen=True)
class Sizes:
    """Bytes of a token in one layer: its keys and values, its queries, its result with the log-sum-exp."""

    keys: int
    queries: int
    results: int


def sent(plan: Plan, sizes: Sizes) -> list[int]:
    """Bytes that each rank sends in one layer [ranks]."""
    return [sum(_bytes(plan, step, sizes) for step in steps) for steps in plan.steps]


def _bytes(plan: Plan, step: Step, sizes: Sizes) -> int:
    if not isinstance(step, Send):
        return 0
    if step.kind == KEYS:
        return sizes.keys * sum(plan.keys[owner].size for owner in step.owners)
    return (step.rows[1] - step.rows[0]) * (
        sizes.queries if step.kind == QUERIES else sizes.results
    )


def stretches(tokens: int, parts: int) -> list[Rows]:
    """`tokens` cut in so many stretches, whose lengths differ by at most 1."""
    cuts = [tokens * i // parts for i in range(parts + 1)]
    return list(zip(cuts[:-1], cuts[1:], strict=True))


@dataclass(frozen=True)
class Zigzag:
    """Chunks i and 2N-1-i of 2N of the new tokens for rank i, so that all have the same causal work; cached token p
    for rank p mod N, so that caches grow evenly.

    half: how many tokens the first of each rank's two chunks has.
    """

    queries: tuple[Ints, ...]
    cached: tuple[Ints, ...]
    half: tuple[int, ...]

    @classmethod
    def of(cls, tokens: int, cached: int, ranks: int) -> Zigzag:
        """Of so many new tokens behind so many cached ones."""
        chunks = [np.arange(*cut) + cached for cut in stretches(tokens, 2 * ranks)]
        return cls(
            tuple(np.concatenate([chunks[i], chunks[-1 - i]]) for i in range(ranks)),
            tuple(np.arange(i, cached, ranks) for i in range(ranks)),
            tuple(chunks[i].size for i in range(ranks)),
        )

    def keys(self, pad: bool) -> tuple[Ints, ...]:
        """Positions of each rank's keys; with `pad` all have as many."""
        held = [np.concatenate(both) for both in zip(self.queries, self.cached, strict=True)]
        wide = max(one.size for one in held) if pad else 0
        return tuple(np.pad(one, (0, max(0, wide - one.size)), constant_values=-1) for one in held)


def around(ranks: int, rank: int) -> Iterator[int]:
    """The ranks whose things reach `rank`, where each sends to the next: its own first."""
    return ((rank - hop) % ranks for hop in range(ranks))
