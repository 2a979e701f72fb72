"""A chain: each token follows the one before (arXiv:2211.17192)."""

from __future__ import annotations

from dataclasses import dataclass

from accel.runtime.speculation.round_cost import RoundCost, unmeasured_cost
from accel.runtime.tree import Base, Draw, Growth, Shape
from accel.runtime.tree._shaped import shaped


@dataclass(frozen=True)
class Chain(Base, Shape):
    """A tree whose nodes have one child each."""

    branches = False

    def begin(self, cost: RoundCost = unmeasured_cost, level: float = 0.0) -> Shape:
        return self

    def grow(self, limit: int, draw: Draw | None = None) -> Growth:
        return shaped([[node + 1] for node in range(limit)] + [[]], draw)
