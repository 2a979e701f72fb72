"""Context parallelism (arXiv:2411.01783): keys, or queries, go around a ring of ranks with balanced tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from accel.ir.axis import option
from accel.runtime.prefill.exchange.plan import (
    KEYS,
    QUERIES,
    RESULTS,
    Attend,
    Plan,
    Receive,
    Send,
    Step,
    Zigzag,
    around,
)
from accel.runtime.prefill.ranks import Base

_BYTES = 4  # of a number


@dataclass(frozen=True)
class CpRing(Base):
    """Rank i has chunks i and 2N-1-i of 2N of the new tokens.

    pass-kv: each rank sends on the keys and values at hand while it attends to them; messages are padded to one
    length. pass-q: keys stay, queries go around, and partial results go home in the end.

    mode "auto" takes pass-kv if T >= N·flops·G·4 / (2·H·bandwidth), or if T/(T+P) >= 2·G/H, of T new and P cached
    tokens, H query heads and G KV heads; and for every whole prompt (P = 0). flops: of a rank, per second, and
    bandwidth: bytes per second of a link; 0: unknown, and the first condition is left out.
    """

    mode: str = option("auto", one_of=("auto", "pass-kv", "pass-q"))
    flops: float = option(0.0, least=0)
    bandwidth: float = option(0.0, least=0)
    lacks = "caches that stay on the ranks, and decoding across ranks"
    small: ClassVar[Mapping[str, Any]] = {"least": 4}

    @property
    def fewest(self) -> int:
        """Two chunks for each rank."""
        return 2 * self.ranks if self.ranks > 1 else 1

    def passes_keys(self, tokens: int, cached: int, heads: int, groups: int) -> bool:
        """Whether keys and values go around; else queries do."""
        if self.mode != "auto":
            return self.mode == "pass-kv"
        if not cached or tokens / (tokens + cached) >= 2 * groups / heads:
            return True
        work = self.ranks * self.flops * groups * _BYTES
        return self.bandwidth > 0 and tokens >= work / (2 * heads * self.bandwidth)

    def planned(self, tokens: int, cached: int, heads: int, groups: int) -> Plan:
        """See Base."""
        whose = Zigzag.of(tokens, cached, self.ranks)
        by_keys = self.passes_keys(tokens, cached, heads, groups)
        keys = whose.keys(pad=by_keys)
        counts, slots = [q.size for q in whose.queries], [k.size for k in keys]
        make = _pass_keys if by_keys else _pass_queries
        return Plan(
            whose.queries, keys, tuple(tuple(make(i, counts, slots)) for i in range(self.ranks))
        )


def _pass_keys(rank: int, counts: list[int], slots: list[int]) -> list[Step]:
    ranks, found = len(counts), list[Step]()
    for hop, owner in enumerate(around(ranks, rank)):
        if hop:
            found.append(Receive((rank - 1) % ranks, KEYS, (owner,)))
        if hop < ranks - 1:
            found.append(Send((rank + 1) % ranks, KEYS, (owner,)))
        found.append(Attend(rank, (0, counts[rank]), ((owner, 0, slots[owner]),)))
    return found


def _pass_queries(rank: int, counts: list[int], slots: list[int]) -> list[Step]:
    ranks, found = len(counts), list[Step]()
    for hop, owner in enumerate(around(ranks, rank)):
        rows = 0, counts[owner]
        if hop:
            found.append(Receive((rank - 1) % ranks, QUERIES, (owner,), rows))
        if hop < ranks - 1:
            found.append(Send((rank + 1) % ranks, QUERIES, (owner,), rows))
        found.append(Attend(owner, rows, ((rank, 0, slots[rank]),)))
    others = [one for one in around(ranks, rank) if one != rank]
    found += [Send(one, RESULTS, (one,), (0, counts[one])) for one in others]
    found += [Receive(one, RESULTS, (rank,), (0, counts[rank])) for one in others]
    return found
