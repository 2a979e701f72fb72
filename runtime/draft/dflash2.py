"""DFlash2, a later form of DFlash (arXiv:2602.06036): a head drafts a block in one call, and of the likeliest tokens of
each place the token before changes which is taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from accel.ir.invariants import Invariant
from accel.runtime.decode.context import DecodeContext
from accel.runtime.decode.row import Row
from accel.runtime.draft import Drafters
from accel.runtime.draft._block_head import BlockHead
from accel.runtime.draft._head import built
from accel.runtime.draft._walk import Walk
from accel.runtime.draft.model import TOKEN
from accel.runtime.speculation.walk import WalkFollower


@dataclass(frozen=True)
class DFlash2(BlockHead):
    """`path`, `weights`: as of `dflash`.

    A token is drawn from the likeliest ones of its place (`selector_top_k` of the head's config.json), by logits that
    the token before it changes.
    """

    asks = {"tree": "chain"}
    provides = frozenset({Invariant.PROBABILITIES})
    lacks = "heads of models that scale embeddings"

    def open(self, session: Any, rows: Sequence[Row], context: DecodeContext) -> Drafters:
        model, head = built(self, context)
        follower = WalkFollower(model, session, len(rows), head)
        cost = self.cost(model, head, len(rows), context, TOKEN)
        return Walk(follower, rows, context, session.vocab_size, cost)
