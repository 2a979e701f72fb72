"""Gemma 4's assistant, which drafts token by token from one place, over keys and values of the target's last layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accel.ir.invariants import Invariant
from accel.ir.taps import FINAL, last_keys, last_values
from accel.runtime.decode.context import DecodeContext
from accel.runtime.decode.row import Row
from accel.runtime.draft import Base, Drafters
from accel.runtime.draft._head import READS_KEYS, built, head_folder
from accel.runtime.draft._walk import Walk
from accel.runtime.draft.model import TOKEN
from accel.runtime.speculation.constant import ConstantFollower
from accel.runtime.speculation.guard import steps_of


@dataclass(frozen=True)
class Gemma4Assistant(Base):
    """`path`: the folder of an assistant (`google/gemma-4-…-assistant`), or an artifact of one; it is copied into the
    artifact. `weights`: as of `eagle3`.

    It samples with each row's sampler.
    """

    path: str = ""
    weights: str = "int8"

    embeds = head = blocks = True
    asks = {"tree": "chain"}
    provides = frozenset({Invariant.PROBABILITIES})
    relies = READS_KEYS | {Invariant.CHAINS}
    lacks = "targets that read tokens in every layer (E2B, E4B), and the unified form"

    def draft_folder(self) -> Path | None:
        return head_folder(self.path)

    def taps(self, layers: int) -> Sequence[str]:
        kinds = [name(window) for window in (False, True) for name in (last_keys, last_values)]
        return (FINAL, *kinds)

    def open(self, session: Any, rows: Sequence[Row], context: DecodeContext) -> Drafters:
        model, head = built(self, context)
        count, cost = len(rows), 0.0
        if context.costs is not None:
            cost = TOKEN / context.costs.seconds[0]
            cost += steps_of(model.costs, count, context.costs, count)
        follower = ConstantFollower(model, session, count, head)
        return Walk(follower, rows, context, session.vocab_size, cost)
