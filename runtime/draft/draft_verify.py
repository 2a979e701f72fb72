"""Draft & Verify (arXiv:2309.08168): self-speculative decoding; drafts leave out attentions and MLPs, by a plan that
was searched for the model, and all of it verifies, with one cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import ClassVar

from accel.ir.errors import InputError
from accel.ir.invariants import Invariant
from accel.ir.trained import Tensors
from accel.runtime.decode.context import DecodeContext
from accel.runtime.decode.row import Row
from accel.runtime.decode.trained_part import Sizes, TrainedPart, sizes_of
from accel.runtime.draft import Base, Drafters
from accel.runtime.draft._by_self import BySelf, cost_of
from accel.runtime.draft._plans import Plan, every_second, layers_by_branch
from accel.runtime.session.session import Session


@dataclass(frozen=True)
class DraftVerify(TrainedPart, Base):
    """A drafted token runs the attentions and MLPs of a plan, the final norm and the LM head. Its cache entries are
    rewound and written again by the verification call.

    `trained`: the plan's file, from `accel-compile train draft-verify`; empty: the one that a build finds for the
    model. A model without one leaves out every second layer, which suits none in particular.

    The recipe gets `depth = by-branch`, which puts each branch under a condition and skips none by default.
    """

    trained: str = ""

    key: ClassVar[str] = "draft-verify"
    optional = True
    lacks = (
        "Bayesian optimisation of the plan: branches are left out one by one, by the expected speed"
    )
    asks = {"tree": "chain", "length": "draft-verify"}
    needs = {"depth": "by-branch"}
    relies = frozenset({Invariant.CHAINS, Invariant.BRANCHES_BY_CALL})
    provides = frozenset({Invariant.PROBABILITIES})

    @classmethod
    def expected(cls, tensors: Tensors) -> Sizes:
        """See TrainedPart. "attn", "mlp": 1 for each branch that runs, else 0; "cost": of a drafted token, in steps."""
        layers = sizes_of(tensors, "attn") or (0,)
        return {"attn": layers, "mlp": layers, "cost": (1,)}

    def open(self, session: Session, rows: Sequence[Row], context: DecodeContext) -> Drafters:
        plan, cost = self.plan(context)
        return BySelf(session, rows, context, cost, **plan.controls)

    def plan(self, context: DecodeContext) -> tuple[Plan, float]:
        """What drafts run, and what a drafted token costs, in plain steps. Raises InputError."""
        layers = layers_by_branch(context, self.full_name)
        if part := self.part:
            if len(part["attn"]) != layers:
                raise InputError(
                    f"{self.full_name}: {self.trained or 'the bundled file'} is a plan of {len(part['attn'])} layers, "
                    f"but the model has {layers}; run accel-compile train {self.key} MODEL, and build again"
                )
            return Plan(part["attn"] > 0, part["mlp"] > 0), float(part["cost"][0])
        plan = Plan.without(set(takewhile(lambda one: one[1] % 2, every_second(layers))), layers)
        return plan, cost_of(context, plan.share)
