"""Confidence-aware proposal expansion (GliDe with a CaPE, arXiv:2402.02082): a chain of the likeliest tokens, each with
more siblings the less sure the drafter is of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from accel.ir.axis import option
from accel.ir.errors import RecipeError, shown
from accel.ir.invariants import Invariant
from accel.runtime.sample import Distribution
from accel.runtime.speculation.round_cost import RoundCost, unmeasured_cost
from accel.runtime.tree import LEVEL, ROOT, Base, Draw, Growth, Level, Shape, Siblings
from accel.runtime.tree._nodes import Nodes, likeliest

USUAL = (8, 8, 8, 6, 6, 6, 4, 4, 2, 2)
MOST = 64  # tokens at one place


@dataclass(frozen=True)
class Cape(Base, Shape):
    """`widths`: tokens at a place, the chain's own among them, where the largest draft probability is below 0.1,
    0.2, …, 1; by default the paper's 8 to 2. `depth`: places. Tokens are chosen, also where the row samples.
    """

    widths: Any = None
    depth: int = option(4, least=1, most=64)

    siblings = Siblings.CHOSEN
    relies = frozenset({Invariant.PROBABILITIES})

    def __post_init__(self) -> None:
        super().__post_init__()
        widths = USUAL if self.widths is None else self.widths
        whole = isinstance(widths, Sequence) and not isinstance(widths, str) and len(widths) == 10
        if not whole or not all(type(width) is int and 0 < width <= MOST for width in widths):
            raise RecipeError(
                f"{self.full_name}: widths are {shown(widths)}; give ten numbers of 1 to {MOST}, for draft "
                f"probabilities below 0.1, 0.2, …, 1, such as {list(USUAL)}"
            )
        object.__setattr__(self, "widths", tuple(widths))

    def begin(self, cost: RoundCost = unmeasured_cost, level: float = 0.0) -> Shape:
        return self

    def grow(self, limit: int, draw: Draw | None = None) -> Growth:
        nodes, last, level = Nodes(), ROOT, LEVEL
        for step in range(self.depth):
            room = limit - len(nodes.tokens)
            if not room or (guesses := (yield level)) is None or guesses[0] is None:
                break
            guess = guesses[0]
            assert isinstance(guess, Distribution), "assembled with a drafter of ranks"
            last = self._place(nodes, last, guess, room, draw)
            level = Level(np.array([nodes.tokens[last]]), np.array([step]))
        return nodes.tree()

    def _place(
        self, nodes: Nodes, last: int, guess: Distribution, room: int, draw: Draw | None
    ) -> int:
        """Add the tokens of a place: the node from which the chain goes on."""
        best, odds = likeliest(guess, min(room, max(self.widths)))
        return nodes.add(last, best[: self.widths[min(9, int(10 * odds[0]))]])[0]
