"""MCTP modules (VITA-Audio, arXiv:2505.03739): a cascade of layers, each of which drafts one token more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accel.ir.invariants import Invariant
from accel.ir.taps import FINAL
from accel.runtime.decode.context import DecodeContext
from accel.runtime.decode.row import Row
from accel.runtime.draft import Base, Drafters
from accel.runtime.draft._head import RELIES, built, head_folder
from accel.runtime.draft._walk import Walk
from accel.runtime.draft.model import TOKEN
from accel.runtime.speculation.cascade import CascadeFollower
from accel.runtime.speculation.guard import steps_of


@dataclass(frozen=True)
class Mctp(Base):
    """`path`: a checkpoint with MCTP modules in its authors' layout, or an artifact of some; they are copied into the
    artifact. Embedding and output head are the target's. `weights`: as of `eagle3`.

    Module m drafts the token m of a draft, by the state of the module before and the embedding of the token before;
    each has a cache of its own. With `verify = unverified` and `length = interleave` drafts stand as they are, as in
    the paper; any other rule verifies them.
    """

    path: str = ""
    weights: str = "int8"

    embeds = head = True
    asks = {"tree": "chain"}
    provides = frozenset({Invariant.PROBABILITIES})
    relies = RELIES | {Invariant.CHAINS}
    lacks = "the speech encoder, and the audio tokenizer and decoder"

    def draft_folder(self) -> Path | None:
        return head_folder(self.path)

    def taps(self, layers: int) -> Sequence[str]:
        return (FINAL,)

    def open(self, session: Any, rows: Sequence[Row], context: DecodeContext) -> Drafters:
        model, head = built(self, context)
        count, cost = len(rows), 0.0
        if context.costs is not None:  # a call runs one of the modules, and what was measured all
            cost = steps_of(model.costs, count, context.costs, count) / head.cascade
            cost += TOKEN / context.costs.seconds[0]
        follower = CascadeFollower(model, session, count, head)
        return Walk(follower, rows, context, session.vocab_size, cost)
