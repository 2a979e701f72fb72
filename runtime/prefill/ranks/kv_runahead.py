"""KV-Runahead (arXiv:2405.05329): each rank hands all keys so far to the next one; slices have unequal lengths."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, ClassVar

import numpy as np

from accel.ir.errors import RecipeError
from accel.runtime.prefill.exchange.plan import KEYS, Attend, Plan, Receive, Send, Step
from accel.runtime.prefill.ranks import Base


@dataclass(frozen=True)
class KvRunahead(Base):
    """Rank i has the i-th slice of the prompt. In each layer it gets the keys and values of all tokens before, sends
    them on with its own, and attends to them. The last rank has the whole cache. Cached tokens begin at rank 0.

    shares: what part of a prompt each rank has, or such lists by the prompt's length: rows of the length and its
    shares, between which lengths are interpolated. `search` finds them out of measured times. None: equal
    causal work, so that earlier slices are longer.
    """

    shares: Any = None
    small: ClassVar[Mapping[str, Any]] = {"least": 4}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.shares is None:
            return
        rows = self.shares if isinstance(self.shares, (list, tuple)) else [self.shares]
        nested = bool(rows) and all(isinstance(row, (list, tuple)) for row in rows)
        table = rows if nested else [[0, *rows]]
        for row in table:
            if (
                len(row) != self.ranks + 1
                or not all(type(x) in (int, float) and 0 <= x < float("inf") for x in row)
                or not min(row[1:], default=0) > 0
            ):
                size = f"{'a length and ' if nested else ''}{self.ranks} numbers above 0"
                raise RecipeError(
                    f"{self.full_name}: shares has {list(row) if nested else self.shares!r}; give {size}, one for each "
                    f"of ranks = {self.ranks}"
                )
        ordered = sorted(tuple(float(x) for x in row) for row in table)
        object.__setattr__(self, "shares", tuple(ordered))

    def cuts(self, tokens: int, cached: int) -> list[int]:
        """Where slices end [ranks]: each has at least a token."""
        if self.shares is None:
            return equal_work(tokens, cached, self.ranks)
        return rounded(interpolated(self.shares, tokens), tokens)

    def planned(self, tokens: int, cached: int, heads: int, groups: int) -> Plan:
        """See Base."""
        ends = self.cuts(tokens, cached)
        slices = [np.arange(a, b) + cached for a, b in zip([0, *ends], ends, strict=False)]
        keys = [*slices]
        keys[0] = np.concatenate([slices[0], np.arange(cached)])
        steps = [_steps(i, slices[i].size, [k.size for k in keys]) for i in range(self.ranks)]
        return Plan(tuple(slices), tuple(keys), tuple(map(tuple, steps)))


def _steps(rank: int, count: int, slots: list[int]) -> list[Step]:
    found: list[Step] = []
    if rank:
        found.append(Receive(rank - 1, KEYS, tuple(range(rank))))
    if rank < len(slots) - 1:
        found.append(Send(rank + 1, KEYS, tuple(range(rank + 1))))
    keys = tuple((owner, 0, slots[owner]) for owner in range(rank + 1))
    return [*found, Attend(rank, (0, count), keys)]


def interpolated(table: Sequence[Sequence[float]], tokens: int) -> list[float]:
    """Shares for a length, of rows (length, shares…) in order: between two rows by length, else the nearest row's."""
    lengths = [row[0] for row in table]
    parts = np.array([np.array(row[1:]) / sum(row[1:]) for row in table])
    return [float(np.interp(tokens, lengths, column)) for column in parts.T]


def rounded(shares: Sequence[float], tokens: int) -> list[int]:
    """Where slices of these shares end; each has at least one of the tokens."""
    count, total = len(shares), float(sum(shares))
    ends = [round(tokens * float(part) / total) for part in np.cumsum(shares)]
    ends[-1] = tokens
    for i in range(count):
        least = ends[i - 1] + 1 if i else 1
        ends[i] = min(max(ends[i], least), tokens - (count - 1 - i))
    return ends


def equal_work(tokens: int, cached: int, ranks: int) -> list[int]:
    """Where slices end that attend to about as many keys each."""
    work = np.cumsum(np.arange(cached + 1, cached + tokens + 1, dtype=np.float64))
    wanted = work[-1] * np.arange(1, ranks + 1) / ranks
    cuts = np.searchsorted(work, wanted) + 1
    return rounded(np.diff([0, *np.minimum(cuts, tokens)]).clip(min=1e-9).tolist(), tokens)


def search(
    seconds: Callable[[list[int]], float], tokens: int, ranks: int, grid: int = 4
) -> tuple[list[int], float]:
    """The cuts with the least measured time, and that time. From an even split on, each run of neighbouring cuts moves
    to the best of `grid` places to either side, which takes tokens from one slice to another; where no move helps, the
    places come closer, down to one token.

    `seconds` measures the time to the first token with slices that end at these places [ranks].
    """
    ends = rounded([1.0] * ranks, tokens)
    best, step = seconds(ends), max(1, tokens // (ranks * (grid + 1)))
    while True:
        before = best
        for i, j in combinations(range(ranks), 2):
            for hop in (h * step for h in range(-grid, grid + 1) if h):
                tried = [end + hop * (i <= at < j) for at, end in enumerate(ends)]
                if min(np.diff([0, *tried])) > 0 and (time := seconds(tried)) < best:
                    best, ends = time, tried
        if best == before and step == 1:
            return ends, best
        step = step if best < before else max(1, step // max(2, grid))
