"""One token after another, as many as may be (arXiv:2211.17192)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from accel.runtime.costs import Costs
from accel.runtime.tree import LEVEL, Base, Draw, Growth, Level, Shape
from accel.runtime.tree._nodes import Nodes


@dataclass(frozen=True)
class Chain(Base, Shape):
    """A tree whose nodes have one child each."""

    branches = False

    def begin(self, costs: Costs | None = None, level: float = 0.0) -> Shape:
        return self

    def grow(self, limit: int, draw: Draw | None = None) -> Growth:
        nodes, level = Nodes(draw), LEVEL
        for node in range(limit):
            if (guesses := (yield level)) is None or not nodes.add(node - 1, guesses[0], 1):
                break
            level = Level(np.array(nodes.tokens[-1:]), np.array([node]))
        return nodes.tree()
