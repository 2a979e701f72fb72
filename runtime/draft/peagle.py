"""P-EAGLE (arXiv:2602.01469): an EAGLE-3 head drafts all its tokens in one call, in slots of masks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accel.ir.invariants import Invariant
from accel.runtime.decode.context import DecodeContext
from accel.runtime.decode.row import Row
from accel.runtime.draft import Base, Drafters
from accel.runtime.draft._head import RELIES, built, head_folder
from accel.runtime.draft._independent import Independent
from accel.runtime.draft._published import config_of, eagle3_taps
from accel.runtime.speculation.guard import steps_of
from accel.runtime.speculation.parallel import ParallelFollower


@dataclass(frozen=True)
class Peagle(Base):
    """`path`: the folder of a head in speculators' layout, or an artifact of one; it is copied into the artifact.
    `weights`: as of `eagle3`.

    A draft is as deep as the head says (`speculative_tokens`), whatever the tree; what it says of a token does not
    depend on those drafted before.
    """

    path: str = ""
    weights: str = "int8"

    embeds = head = blocks = True
    asks = {"tree": "chain"}
    provides = frozenset({Invariant.PROBABILITIES})
    relies = RELIES

    def draft_folder(self) -> Path | None:
        return head_folder(self.path)

    def taps(self, layers: int) -> Sequence[str]:
        folder = self.draft_folder()
        assert folder is not None
        return eagle3_taps(config_of(folder, self.full_name), layers)

    def open(self, session: Any, rows: Sequence[Row], context: DecodeContext) -> Drafters:
        model, head = built(self, context)
        count, cost = len(rows), 0.0
        if context.costs is not None:  # the newest token, then all masks
            calls = (count, count * (head.parallel - 1) or count)
            cost = sum(steps_of(model.costs, n, context.costs, count) for n in calls)
            cost /= head.parallel
        follower = ParallelFollower(model, session, count, True, head)
        return Independent(follower, rows, context, session.vocab_size, cost)
