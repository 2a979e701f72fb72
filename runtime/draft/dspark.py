"""DSpark (arXiv:2607.05147): a head drafts a block in one call, and a small head walks over it, which knows the token
before and says where to end.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from accel.ir.errors import RecipeError
from accel.ir.invariants import Invariant
from accel.runtime.call import Logits
from accel.runtime.decode.context import DecodeContext
from accel.runtime.decode.row import Row
from accel.runtime.draft import Drafters
from accel.runtime.draft._block_head import BlockHead
from accel.runtime.draft._head import built
from accel.runtime.draft._walk import Walk
from accel.runtime.draft.model import TOKEN
from accel.runtime.inputs.ints import Ints
from accel.runtime.sample import Distribution
from accel.runtime.speculation.walk import WalkFollower


@dataclass(frozen=True)
class DSpark(BlockHead):
    """`path`: the folder of a head, in its authors' layout or that of speculators, or an artifact of one; it is copied
    into the artifact. Embedding and output head are its own. `weights`: as of `eagle3`.

    `threshold`: a draft ends before the first place whose chance to stand the head says to be below this; 0: it is
    never asked.
    """

    threshold: float = 0.0

    asks = {"tree": "chain"}
    provides = frozenset({Invariant.PROBABILITIES})
    lacks = "the schedule of verification by load, and heads of Gemma and DeepSeek-V4"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.threshold < 1:
            raise RecipeError(
                f"{self.full_name}: threshold = {self.threshold}; give a chance of 0 or more and less than 1"
            )

    def open(self, session: Any, rows: Sequence[Row], context: DecodeContext) -> Drafters:
        model, head = built(self, context)
        cost = self.cost(model, head, len(rows), context, TOKEN)
        follower = WalkFollower(model, session, len(rows), head)
        return _Sure(follower, self.threshold, rows, context, session.vocab_size, cost)


class _Sure(Walk):
    """Each draft ends before the first place that is not sure enough."""

    def __init__(self, follower: WalkFollower, threshold: float, *args: Any):
        super().__init__(follower, *args)
        self._least = math.log(threshold / (1 - threshold)) if threshold else -math.inf

    def law(self, row: int, logits: Logits, seen: Ints) -> Distribution | None:
        """None where the place is not sure enough, which tokens before decide, not its own."""
        if self._follower.confidence[row] < self._least:
            return None
        return super().law(row, logits, seen)
