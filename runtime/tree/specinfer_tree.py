"""Expansion widths (SpecInfer, arXiv:2305.09781): each node of a level has the same number of children, drawn
independently.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from accel.runtime.speculation.round_cost import RoundCost, unmeasured_cost
from accel.runtime.tree import Base, Draw, Growth, Shape, Siblings
from accel.runtime.tree._shaped import Form, checked_widths, formed, level_paths, shaped

USUAL = (1, 1, 3, 1, 1, 1, 1, 1)
MOST = 512  # nodes


@dataclass(frozen=True)
class SpecinferTree(Base, Shape):
    """`widths`: how many children each node of a level has, from the root on; with a lower limit the first nodes are
    used, level by level. Default: three branches from the third token on, as in the paper.
    """

    widths: Any = None

    siblings = Siblings.INDEPENDENT

    def __post_init__(self) -> None:
        super().__post_init__()
        widths = USUAL if self.widths is None else self.widths
        object.__setattr__(self, "widths", checked_widths("specinfer-tree", widths, MOST))

    def begin(self, cost: RoundCost = unmeasured_cost, level: float = 0.0) -> Shape:
        return self

    def grow(self, limit: int, draw: Draw | None = None) -> Growth:
        return shaped(_form(self.widths, limit), draw, replacement=True)


@lru_cache(maxsize=256)
def _form(widths: tuple[int, ...], limit: int) -> Form:
    return formed(level_paths(widths)[:limit])
