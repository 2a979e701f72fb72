"""STAND's template (arXiv:2506.04708): a large tree was drafted for a few problems, and the nodes that stood most often
are the tree of all drafts.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files as resources
from pathlib import Path
from typing import Any

from accel.ir.errors import RecipeError, shown
from accel.runtime.speculation.round_cost import RoundCost, unmeasured_cost
from accel.runtime.tree import Base, Shape
from accel.runtime.tree._shaped import Formed, checked_paths, fitted
from accel.runtime.tree._shaped import Path as Ranks

OWN = "stand.json"  # of accel.reference
MOST = 512  # nodes
MAKE = "make it: python tools/tree_template.py MODEL --out FILE"
Template = tuple[tuple[Ranks, ...], tuple[float, ...]]


@dataclass(frozen=True)
class Stand(Base):
    """`template`: a file of `tools/tree_template.py`; empty: that of the bundled model, which other models may take,
    too, as it decides speed only. Of its nodes the first ones are used, as many as give the most tokens per time.
    """

    template: str = ""

    files = ("template",)

    def __post_init__(self) -> None:
        super().__post_init__()
        if (
            self.template and Path(self.template).is_file()
        ):  # else a build says that it is not there
            _read(self.template)

    def begin(self, cost: RoundCost = unmeasured_cost, level: float = 0.0) -> Shape:
        paths, stand = _read(self.template)
        return Formed(fitted(paths, stand, cost, level))


@lru_cache(maxsize=64)
def _read(name: str) -> Template:
    """Paths of ranks, and how often the node of each stands. Raises RecipeError for a file that has none."""
    try:
        file = Path(name) if name else resources("accel.reference") / OWN
        told: Any = json.loads(file.read_text(encoding="utf-8"))
        paths, stand = told["paths"], told["stand"]
        same = isinstance(paths, list) and isinstance(stand, list) and len(paths) == len(stand) > 0
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RecipeError(f"tree.stand: {name} holds no template ({error}); {MAKE}") from error
    wrong = (
        [x for x in stand if type(x) is not float or not 0 <= x <= 1 or math.isnan(x)]
        if same
        else ["paths"]
    )
    if wrong:
        why = (
            f"{shown(wrong[0])} is not how often a node stands"
            if same
            else "paths and stand differ in length"
        )
        raise RecipeError(f"tree.stand: {name}: {why}; {MAKE}")
    return checked_paths("stand", paths, MOST), tuple(stand)
