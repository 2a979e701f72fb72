"""A fixed tree for every draft, as in Medusa (arXiv:2401.10774) and Token Recycling (arXiv:2408.08696)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from accel.ir.errors import RecipeError
from accel.runtime.speculation.round_cost import RoundCost, unmeasured_cost
from accel.runtime.tree import Base, Shape
from accel.runtime.tree._shaped import (
    Formed,
    Path,
    chances,
    checked_paths,
    checked_widths,
    fitted,
    level_paths,
    likely,
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
        super().__post_init__()
        if self.widths is not None:
            if self.paths is not None:
                raise RecipeError("tree.static: paths and widths are both given; give one of them")
            object.__setattr__(self, "widths", checked_widths("static", self.widths, MOST))
            object.__setattr__(self, "paths", tuple(level_paths(self.widths)))
        elif self.paths is not None:
            object.__setattr__(self, "paths", checked_paths("static", self.paths, MOST))

    def begin(self, cost: RoundCost = unmeasured_cost, level: float = 0.0) -> Shape:
        if self.paths is not None:
            return Formed(self.paths)
        paths, stand = _default()
        return Formed(fitted(paths, stand, cost, level))


@lru_cache(maxsize=1)
def _default() -> tuple[list[Path], list[float]]:
    """Paths, and how often the node of each stands."""
    paths = likely(RATES, NODES, DEPTH)
    return paths, chances(paths, RATES)
