"""Drafters that are heads of their target: they run over what it computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from accel.ir.draft_head import DraftHead
from accel.ir.errors import InputError
from accel.ir.invariants import Invariant
from accel.runtime.decode.context import DecodeContext
from accel.runtime.decode.row import Row
from accel.runtime.draft import Base, Drafters
from accel.runtime.draft._by_levels import ByLevels
from accel.runtime.draft.model import LEVEL, TOKEN, Chains
from accel.runtime.speculation.features import FeatureFollower
from accel.runtime.speculation.guard import steps_of

# a token that some layers did not run here leaves no hidden states, and taps are numbered by layer
RELIES = frozenset({Invariant.EVERY_TOKEN_RUNS, Invariant.ALL_LAYERS_RUN, Invariant.FIXED_LAYERS})
# of a head that reads its target's keys and values in the slots where each call put them
READS_KEYS = RELIES | {Invariant.PLAIN_KEYS, Invariant.ALL_TOKENS_HELD, Invariant.ROW_PRIVATE}


def head_folder(path: str, bundled: str = "") -> Path:
    """Where a head lies: at `path`; where that is empty, the bundled one of this name, or the bundled model."""
    return Path(path or str(files("accel.reference") / bundled)).expanduser()


def built(method: Base, context: DecodeContext) -> tuple[Any, DraftHead]:
    """The head's model that was built with the target, and what it says of itself. Raises InputError."""
    model = None if context.model is None else context.model.draft_model
    head = None if model is None else model.facts.draft_head
    if model is None or head is None or head.drafter != method.use:
        raise InputError(
            f"{method.full_name}: this model was built without its head; build it again"
        )
    return model, head


@dataclass(frozen=True)
class Head(Base):
    """A head with an artifact of its own, which gives the logits of a token and the features of the next."""

    embeds = head = True
    asks = {"tree": "chain"}
    provides = frozenset({Invariant.PROBABILITIES})
    relies = RELIES

    def open(self, session: Any, rows: Sequence[Row], context: DecodeContext) -> Drafters:
        model, head = built(self, context)
        branches = context.methods["tree"].branches
        known, count, draft_cost = context.costs, len(rows), 0.0
        if known:
            host = (LEVEL if branches else TOKEN) / known.seconds[0]
            draft_cost = host + steps_of(model.costs, count, known, count)
        follower = FeatureFollower(model, session, count, branches, head)
        kind = ByLevels if branches else Chains
        return kind(follower, rows, context, session.vocab_size, draft_cost)
