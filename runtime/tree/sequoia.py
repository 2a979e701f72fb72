"""Sequoia (arXiv:2402.12374): the form of which most tokens stand for what its call costs on this machine, by how
often the child of each rank stands.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from accel.ir.errors import RecipeError
from accel.runtime.costs import Costs
from accel.runtime.tree import ROOT, Base, Draw, Growth, Shape, Tree
from accel.runtime.tree._optimal import Optimal, speeds
from accel.runtime.tree._shaped import formed, shaped

NODES = 32  # of a tree, at most, the root among them
FIRST = 4  # drafts after which rates are looked at again, twice as many after each further time, up to
MOST = 64
FADE = 0.98  # what a draft weighs after each later one
BELIEF = 8.0  # nodes, for what is believed before any was seen
BELIEVED = (0.5, 0.12, 0.06, 0.04, 0.03, 0.02, 0.015, 0.01)  # as of `static`


@dataclass(frozen=True)
class Sequoia(Base):
    """`depth`: most levels. `rates`: how often the first, the second, … child of a node that stands is the one that
    stands; by default measured for each row while it runs. Where no costs are known, trees are as large as they may.
    """

    depth: int = 8
    rates: Any = None

    def __post_init__(self) -> None:
        if not 1 <= self.depth <= NODES:
            raise RecipeError(f"tree.sequoia: depth is {self.depth}; give 1 to {NODES}")
        if self.rates is None:
            return
        numbers = isinstance(self.rates, Sequence) and all(type(r) in (int, float) and r >= 0 for r in self.rates)
        if not numbers or isinstance(self.rates, str) or not 0 < sum(self.rates) <= 1:
            raise RecipeError(
                f"tree.sequoia: rates are {self.rates!r}; give a share of each rank, 0 or more, 1 in all at most, as "
                "[0.5, 0.12, 0.06]"
            )
        object.__setattr__(self, "rates", tuple(map(float, self.rates)))

    def begin(self, costs: Costs | None = None, level: float = 0.0) -> Shape:
        if costs is None:
            return _Measured(self.depth, self.rates, (), 0.0)
        calls = tuple(costs.ratio(nodes) for nodes in range(1, min(NODES, costs.tokens[-1]) + 1))
        return _Measured(self.depth, self.rates, calls, level / costs.seconds[0])


class _Measured(Shape):
    """Of one row."""

    def __init__(self, depth: int, rates: tuple[float, ...] | None, calls: tuple[float, ...], level: float):
        self._depth, self._fixed, self._calls, self._level = depth, rates, calls, level
        self._stood, self._tried = BELIEF * np.array(BELIEVED), np.full(len(BELIEVED), BELIEF)
        self._rates = BELIEVED if rates is None else rates
        self._wait = self._pause = FIRST

    def grow(self, limit: int, draw: Draw | None = None) -> Growth:
        paths = _paths(self._rates, min(limit, NODES - 1), self._depth, self._calls, self._level)
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
    return Optimal(rates, NODES, depth)


@lru_cache(maxsize=1024)
def _paths(rates: tuple[float, ...], limit: int, depth: int, calls: tuple[float, ...], level: float) -> Any:
    """The paths of the tree of 1 to `limit` nodes that gives most tokens for its time, or most at all."""
    if not limit:
        return []
    optimal = _optimal(rates, depth)
    costs = np.array([1.0, *(calls or [1.0] * NODES)])[: limit + 2]
    gained = speeds(optimal, costs, level)
    gained[:, :2] = -np.inf  # whether to draft at all is not asked here
    levels, nodes = np.unravel_index(int(gained.argmax()), gained.shape)
    return optimal.paths(int(nodes), int(levels))
