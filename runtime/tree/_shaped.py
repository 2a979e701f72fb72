"""Trees of a form that is known before: how it is written, made of rates, and grown."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from heapq import heappop, heappush
from typing import Any

import numpy as np

from accel.ir.errors import RecipeError, shown
from accel.runtime.inputs.ints import Ints
from accel.runtime.speculation.round_cost import RoundCost
from accel.runtime.tree import LEVEL, ROOT, Draw, Growth, Level, Shape
from accel.runtime.tree._nodes import Nodes, children

Path = tuple[
    int, ...
]  # a node as ranks from the root on: (0,) the first child of it, (0, 1) the second one of that
Form = Sequence[Sequence[int]]  # the children of each node, the root the first


def formed(paths: Sequence[Path]) -> Form:
    """The form of paths; each one's parent and its sibling of the rank before come before it."""
    place = {(): 0} | {path: i + 1 for i, path in enumerate(paths)}
    form: list[list[int]] = [[] for _ in place]
    for path in paths:
        form[place[path[:-1]]].append(place[path])
    return form


def checked_widths(name: str, widths: Any, most: int) -> tuple[int, ...]:
    """How many children each node of a level has, of the shape `name`. Raises RecipeError for what is none, and for
    more than `most` nodes.
    """
    whole = isinstance(widths, Sequence) and not isinstance(widths, str) and len(widths) > 0
    if not whole or not all(type(width) is int and width > 0 for width in widths):
        raise RecipeError(
            f"tree.{name}: widths are {shown(widths)}; give the children of each node of a level, such as [1, 1, 3, 1]"
        )
    nodes = sum(itertools.accumulate(widths, lambda a, b: min(a * b, most + 1)))
    if nodes > most:
        raise RecipeError(
            f"tree.{name}: widths {shown(widths)} make more than {most} nodes; give smaller ones"
        )
    return tuple(widths)


def level_paths(widths: Sequence[int]) -> list[Path]:
    """The paths of a tree of these widths, level by level."""
    paths: list[Path] = []
    for level in range(len(widths)):
        paths += itertools.product(*(range(width) for width in widths[: level + 1]))
    return paths


def likely(rates: Sequence[float], count: int, depth: int) -> list[Path]:
    """The `count` paths that stand most likely, at most so deep, the likeliest first, where `rates` say how often the
    child of each rank does, none more often than the one before. So any number of the first ones is the best form
    of that size.
    """
    paths: list[Path] = []
    # Less how often a node stands, its level (of equals the less deep), how often its parent does.
    heap: list[tuple[float, int, Path, float]] = [(-rates[0], 1, (0,), 1.0)]
    while heap and len(paths) < count:
        value, level, path, above = heappop(heap)
        paths.append(path)
        if (rank := path[-1] + 1) < len(rates):
            heappush(heap, (-above * rates[rank], level, (*path[:-1], rank), above))
        if level < depth:
            heappush(heap, (value * rates[0], level + 1, (*path, 0), -value))
    return paths


def chances(paths: Sequence[Path], rates: Sequence[float]) -> list[float]:
    """How often the node of each path stands."""
    return [math.prod(rates[rank] for rank in path) for path in paths]


def fitted(
    paths: Sequence[Path], stand: Sequence[float], cost: RoundCost, level: float
) -> tuple[Path, ...]:
    """As many of the first paths as give the most tokens per time, where `stand` [n] says how often each one's node
    stands; `cost`, `level`: as of `Base.begin`.
    """
    levels = np.maximum.accumulate([len(path) for path in paths])
    taken = np.array([cost(count) for count in range(1, len(paths) + 1)]) + level * levels
    return tuple(paths[: 1 + int(((1 + np.cumsum(stand)) / taken).argmax())])


def checked_paths(name: str, paths: Any, most: int) -> tuple[Path, ...]:
    """Paths that make a form, of the shape `name`. Raises RecipeError for one that does not, or more than `most`."""
    found: dict[Path, None] = {}
    if isinstance(paths, Sequence) and len(paths) > most:
        raise RecipeError(f"tree.{name}: {len(paths)} paths are out of range; give at most {most}")
    for path in paths if isinstance(paths, Sequence) and not isinstance(paths, str) else [paths]:
        whole = isinstance(path, Sequence) and path and all(type(r) is int and r >= 0 for r in path)
        if not whole or isinstance(path, str):
            raise RecipeError(
                f"tree.{name}: path {shown(path)} is not a list of ranks; give paths as [[0], [1], [0, 0]]"
            )
        path = tuple(path)
        before = path[:-1] if path[-1] == 0 else (*path[:-1], path[-1] - 1)
        for wanted in (path[:-1], before):
            if wanted and wanted not in found:
                raise RecipeError(
                    f"tree.{name}: path {list(path)} lacks its parent {list(wanted)}; put that before it"
                )
        if path in found:
            raise RecipeError(f"tree.{name}: path {list(path)} occurs twice; remove one")
        found[path] = None
    return tuple(found)


@dataclass(frozen=True)
class Formed(Shape):
    """Grows one form, of which the first nodes are used where the limit is lower."""

    paths: tuple[Path, ...]

    def grow(self, limit: int, draw: Draw | None = None) -> Growth:
        return shaped(_form(self.paths, limit), draw)


@lru_cache(maxsize=256)
def _form(paths: tuple[Path, ...], limit: int) -> Form:
    return formed(paths[:limit])


def shaped(form: Form, draw: Draw | None, replacement: bool = False) -> Growth:
    """Grow a tree of that form, less what has no probability. `replacement`: siblings are drawn independently; those
    that hold the same token are one node, below which all goes on that the form has below them.
    """
    nodes, level, expanded = Nodes(replacement), LEVEL, 0
    # Nodes to expand: where they are in the form, and in the tree.
    open_: list[tuple[list[int], int]] = [([0], ROOT)] if form[0] else []
    while open_:
        guesses = yield level
        if guesses is None:
            break
        rows = guesses.tolist() if isinstance(guesses, np.ndarray) else guesses
        below, above = list[tuple[list[int], int]](), list[int]()
        for number, ((places, node), guess) in enumerate(zip(open_, rows, strict=True)):
            wanted = [child for place in places for child in form[place]]
            if isinstance(guess, list):
                added = nodes.add(node, [token for token in guess[: len(wanted)] if token >= 0])
            else:
                found = children(guess, len(wanted), draw, replacement)
                added = nodes.add(node, found, None if draw is None else guess)
            of: dict[int, list[int]] = {}
            for child, new in zip(wanted, added, strict=False):
                if form[child]:
                    of.setdefault(new, []).append(child)
            below += [(those, new) for new, those in of.items()]
            above += [expanded + number] * len(of)
        expanded += len(rows)
        open_ = below
        level = Level(_ints([nodes.tokens[new] for _, new in open_]), _ints(above))
    return nodes.tree()


def _ints(values: list[int]) -> Ints:
    return np.array(values, np.int64)
