"""TokenRing (arXiv:2412.20501): queries go one way around the ranks while partial results go the other way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from accel.runtime.prefill.exchange.plan import (
    QUERIES,
    RESULTS,
    Attend,
    Plan,
    Receive,
    Rows,
    Send,
    Step,
    Zigzag,
)
from accel.runtime.prefill.ranks import Base


@dataclass(frozen=True)
class TokenRing(Base):
    """Rank r has chunks r and 2N-1-r of 2N. Keys and values stay. At step s rank r attends for rank r+s, and sends
    what it found for rank r+s-1 straight home.

    Of a rank behind it (r+s < N) all queries read the first chunk here; of a rank before it only the second chunk's
    queries read anything, and all keys here. Cached tokens are read by all queries, so with them queries
    travel whole.
    """

    lacks = "caches that stay on the ranks, and decoding across ranks"
    small: ClassVar[Mapping[str, Any]] = {"least": 4}

    @property
    def fewest(self) -> int:
        """Two chunks for each rank."""
        return 2 * self.ranks if self.ranks > 1 else 1

    def planned(self, tokens: int, cached: int, heads: int, groups: int) -> Plan:
        """See Base."""
        whose = Zigzag.of(tokens, cached, self.ranks)
        keys = whose.keys(pad=False)
        steps = (tuple(_steps(i, whose, [k.size for k in keys])) for i in range(self.ranks))
        return Plan(whose.queries, keys, tuple(steps))


def _steps(rank: int, whose: Zigzag, slots: list[int]) -> list[Step]:
    ranks = len(slots)
    before, after = (rank - 1) % ranks, (rank + 1) % ranks
    own = whose.queries[rank].size
    found: list[Step] = [Attend(rank, (0, own), ((rank, 0, slots[rank]),))]
    for step in range(1, ranks):
        owner, sent = (rank + step) % ranks, (rank + step - 1) % ranks
        found.append(Send(before, QUERIES, (sent,), _rows(before, step, whose)))
        if step > 1:
            found += _home(rank, step - 1, whose)
        rows = _rows(rank, step, whose)
        found.append(Receive(after, QUERIES, (owner,), rows))
        found.append(Attend(owner, rows, _read(rank, step, whose, slots)))
    return found + (_home(rank, ranks - 1, whose) if ranks > 1 else [])


def _home(rank: int, step: int, whose: Zigzag) -> list[Step]:
    """What a step gave goes to the queries' owner, and its own come back."""
    ranks = len(whose.queries)
    owner, source = (rank + step) % ranks, (rank - step) % ranks
    return [
        Send(owner, RESULTS, (owner,), _rows(rank, step, whose)),
        Receive(source, RESULTS, (rank,), _rows(source, step, whose)),
    ]


def _wrapped(rank: int, step: int, whose: Zigzag) -> bool:
    """Whether the queries at a rank are of one before it."""
    return rank + step >= len(whose.queries)


def _rows(rank: int, step: int, whose: Zigzag) -> Rows:
    """The queries that reach a rank at a step."""
    owner = (rank + step) % len(whose.queries)
    whole = not _wrapped(rank, step, whose) or any(one.size for one in whose.cached)
    return (0 if whole else whose.half[owner]), whose.queries[owner].size


def _read(
    rank: int, step: int, whose: Zigzag, slots: list[int]
) -> tuple[tuple[int, int, int], ...]:
    """The keys that they read there."""
    if _wrapped(rank, step, whose):
        return ((rank, 0, slots[rank]),)
    first = (rank, 0, whose.half[rank])
    kept = (rank, whose.queries[rank].size, slots[rank])
    return (first, kept) if kept[1] < kept[2] else (first,)
