"""NAME (paper, arXiv): what it does, in a sentence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from accel.runtime.prefill.exchange.plan import KEYS, Attend, Plan, Receive, Send, Step, stretches
from accel.runtime.prefill.ranks import Base


@dataclass(frozen=True)
class Template(Base):
    """Who attends to what, and who sends what: here, slices of equal length, whose keys go to every later rank."""

    small: ClassVar[Mapping[str, Any]] = {"least": 4}

    def planned(self, tokens: int, cached: int, heads: int, groups: int) -> Plan:
        """See Base."""
        own = [np.arange(*cut) + cached for cut in stretches(tokens, self.ranks)]
        keys = [np.concatenate([own[0], np.arange(cached)]), *own[1:]]
        steps: list[tuple[Step, ...]] = []
        for rank in range(self.ranks):
            to: list[Step] = [Send(later, KEYS, (rank,)) for later in range(rank + 1, self.ranks)]
            came: list[Step] = [Receive(earlier, KEYS, (earlier,)) for earlier in range(rank)]
            read = tuple((owner, 0, keys[owner].size) for owner in range(rank + 1))
            steps.append((*to, *came, Attend(rank, (0, own[rank].size), read)))
        return Plan(tuple(own), tuple(keys), tuple(steps))
