"""NAME (paper, arXiv): what it does, in a sentence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from accel.runtime.prefill.exchange.plan import KEYS, Attend, Plan, Receive, Send, Step, Zigzag
from accel.runtime.prefill.ranks import Base


@dataclass(frozen=True)
class Template(Base):
    """Who attends to what, and who sends what: here, slices of equal work, whose keys go to every other rank."""

    small: ClassVar[Mapping[str, Any]] = {"least": 4}

    @property
    def fewest(self) -> int:
        """Two chunks for each rank."""
        return 2 * self.ranks if self.ranks > 1 else 1

    def planned(self, tokens: int, cached: int, heads: int, groups: int) -> Plan:
        """See Base."""
        whose = Zigzag.of(tokens, cached, self.ranks)
        keys, ranks = whose.keys(pad=False), range(self.ranks)
        read = tuple((owner, 0, keys[owner].size) for owner in ranks)
        steps: list[tuple[Step, ...]] = []
        for rank in ranks:
            others = [other for other in ranks if other != rank]
            to: list[Step] = [Send(other, KEYS, (rank,)) for other in others]
            came: list[Step] = [Receive(other, KEYS, (other,)) for other in others]
            steps.append((*to, *came, Attend(rank, (0, whose.queries[rank].size), read)))
        return Plan(whose.queries, keys, tuple(steps))
