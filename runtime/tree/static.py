"""A fixed tree for every draft, as in Medusa (arXiv:2401.10774) and Token Recycling (arXiv:2408.08696)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from accel.ir.errors import RecipeError, shown
from accel.runtime.inputs.ints import Ints
from accel.runtime.speculation.round_cost import RoundCost, unmeasured_cost
from accel.runtime.tree import Base, Draw, Growth, Shape
from accel.runtime.tree._shaped import (
    Form,
    Path,
    chances,
    checked_widths,
    formed,
    level_paths,
    likely,
    shaped,
)

# How often the first, the second, … of what token recycling had for a token was the one that came: the bundled model at
# temperature 0.5 over code that it has not seen. Greedy the first was 85%, at temperature 1 10%.
RATES = (0.62, 0.08, 0.03, 0.03, 0.015, 0.01, 0.005, 0.005)
NODES, DEPTH = 80, 6
MOST = 512  # paths that may be given


@dataclass(frozen=True)
class Static(Base):
    """`paths`: nodes as paths of ranks from the root, like Medusa's choices ([0] is the root's first child,
    [0, 1] its second child);
    with a lower limit the first nodes are used. `widths` instead: how many children each node of a level has, as in
    MCSD (arXiv:2401.06706). Default: the most often accepted nodes of up to 80, by the
    acceptance rates of token recycling, as many as give the most tokens per time.
    """

    paths: Any = None
    widths: Any = None

    def __post_init__(self) -> None:
        if self.widths is not None:
            if self.paths is not None:
                raise RecipeError("tree.static: paths and widths are both given; give one of them")
            object.__setattr__(self, "widths", checked_widths("static", self.widths, MOST))
            object.__setattr__(self, "paths", tuple(level_paths(self.widths)))
        elif self.paths is not None:
            object.__setattr__(self, "paths", _checked(self.paths))

    def begin(self, cost: RoundCost = unmeasured_cost, level: float = 0.0) -> Shape:
        if self.paths is not None:
            return _Formed(self.paths)
        paths, tokens, levels = _default()
        taken = np.array([cost(count) for count in range(1, len(paths) + 1)]) + level * levels
        return _Formed(paths[: 1 + int((tokens / taken).argmax())])


@dataclass(frozen=True)
class _Formed(Shape):
    paths: tuple[Path, ...]

    def grow(self, limit: int, draw: Draw | None = None) -> Growth:
        return shaped(_form(self.paths, limit), draw)


@lru_cache(maxsize=1)
def _default() -> tuple[tuple[Path, ...], npt.NDArray[np.float64], Ints]:
    """Paths, and of the form of so many of them the tokens expected and the levels, [n]."""
    paths = tuple(likely(RATES, NODES, DEPTH))
    return (
        paths,
        1 + np.cumsum(chances(paths, RATES)),
        np.maximum.accumulate([len(path) for path in paths]),
    )


@lru_cache(maxsize=256)
def _form(paths: tuple[Path, ...], limit: int) -> Form:
    return formed(paths[:limit])


def _checked(paths: Any) -> tuple[Path, ...]:
    """Paths that make a form. Raises RecipeError for one that does not."""
    found: dict[Path, None] = {}
    if isinstance(paths, Sequence) and len(paths) > MOST:
        raise RecipeError(f"tree.static: {len(paths)} paths are out of range; give at most {MOST}")
    for path in paths if isinstance(paths, Sequence) and not isinstance(paths, str) else [paths]:
        whole = isinstance(path, Sequence) and path and all(type(r) is int and r >= 0 for r in path)
        if not whole or isinstance(path, str):
            raise RecipeError(
                f"tree.static: path {shown(path)} is not a list of ranks; give paths as [[0], [1], [0, 0]]"
            )
        path = tuple(path)
        before = path[:-1] if path[-1] == 0 else (*path[:-1], path[-1] - 1)
        for wanted in (path[:-1], before):
            if wanted and wanted not in found:
                raise RecipeError(
                    f"tree.static: path {list(path)} lacks its parent {list(wanted)}; put that before it"
                )
        if path in found:
            raise RecipeError(f"tree.static: path {list(path)} occurs twice; remove one")
        found[path] = None
    return tuple(found)
