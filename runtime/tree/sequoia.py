"""Sequoia (arXiv:2402.12374): the tree with the most expected accepted tokens per time, from acceptance by rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from accel.ir.axis import option
from accel.ir.errors import RecipeError, shown
from accel.runtime.speculation.round_cost import RoundCost, unmeasured_cost
from accel.runtime.tree import ROOT, Base, Draw, Growth, Shape, Tree
from accel.runtime.tree._optimal import Optimal
from accel.runtime.tree._shaped import Path, formed, shaped
from accel.runtime.tree.static import RATES

NODES = 31  # of a tree, at most
FIRST = (
    4  # drafts after which rates are looked at again, twice as many after each further time, up to
)
MOST = 64
FADE = 0.98  # what a draft weighs after each later one
BELIEF = 8.0  # nodes, for what is believed before any was seen


@dataclass(frozen=True)
class Sequoia(Base):
    """`depth`: maximum number of levels. `rates`: probability that the first, second, … child of an accepted
    node is the accepted one; by default measured for each row while it runs.
    """

    depth: int = option(8, least=1, most=NODES)
    rates: Any = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rates is None:
            return
        numbers = isinstance(self.rates, Sequence) and all(
            type(r) in (int, float) and r >= 0 for r in self.rates
        )
        if not numbers or isinstance(self.rates, str) or not 0 < sum(self.rates) <= 1:
            raise RecipeError(
                f"{self.full_name}: rates are {shown(self.rates)}; give one acceptance rate per rank, each at least 0, "
                "with a sum of at most 1, such as [0.5, 0.12, 0.06]"
            )
        object.__setattr__(self, "rates", tuple(map(float, self.rates)))

    def begin(self, cost: RoundCost = unmeasured_cost, level: float = 0.0) -> Shape:
        return _Measured(
            self.depth, self.rates, tuple(cost(nodes) for nodes in range(NODES + 1)), level
        )


class _Measured(Shape):
    """Of one row."""

    def __init__(
        self, depth: int, rates: tuple[float, ...] | None, costs: tuple[float, ...], level: float
    ):
        self._depth, self._fixed, self._costs, self._level = depth, rates, costs, level
        self._stood, self._tried = BELIEF * np.array(RATES), np.full(len(RATES), BELIEF)
        self._rates = RATES if rates is None else rates
        self._wait = self._pause = FIRST

    def grow(self, limit: int, draw: Draw | None = None) -> Growth:
        paths = _paths(self._rates, min(limit, NODES), self._depth, self._costs, self._level)
        return shaped(formed(paths), draw)

    def observe(self, tree: Tree, path: Sequence[int]) -> None:
        if self._fixed is not None:
            return
        self._stood *= FADE
        self._tried *= FADE
        for node, stands in zip((ROOT, *path), (*path, None), strict=True):
            children = tree.children(node)
            self._tried[: len(children)] += 1
            if stands is not None:
                self._stood[children.index(stands)] += 1
        self._wait -= 1
        if not self._wait:
            self._rates = tuple(np.round(self._stood / self._tried, 3).tolist())
            self._wait = self._pause = min(2 * self._pause, MOST)


@lru_cache(maxsize=64)
def _optimal(rates: tuple[float, ...], depth: int) -> Optimal:
    return Optimal(rates, NODES + 1, depth)


@lru_cache(maxsize=1024)
def _paths(
    rates: tuple[float, ...], limit: int, depth: int, costs: tuple[float, ...], level: float
) -> list[Path]:
    """Of the tree of 1 to `limit` nodes that gives most tokens for its time."""
    if not limit:
        return []
    optimal = _optimal(rates, depth)
    taken = np.array(costs[: limit + 1]) + level * np.arange(depth + 1)[:, None]
    gained = optimal.expected[:, 1 : limit + 2] / taken
    gained[:, 0] = -np.inf  # whether to draft at all is not asked here
    levels, nodes = np.unravel_index(int(gained.argmax()), gained.shape)
    return optimal.paths(1 + int(nodes), int(levels))
