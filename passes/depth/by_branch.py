"""Branches as an input: a call selects the layers whose attention, and those whose MLP, runs (`run_attn`, `run_mlp`);
the default is all.
"""

from __future__ import annotations

from dataclasses import dataclass

from accel.ir.depth import NESTED, Depth
from accel.ir.invariants import Invariant
from accel.ir.program import Program
from accel.passes import Report
from accel.passes.depth import Base
from accel.passes.depth._joint import branch_conditions


@dataclass(frozen=True)
class ByBranch(Base):
    """For drafts that leave out attention and MLPs apart, such as `draft = draft-verify`. Attention that is skipped for
    a token stays off until that token is rewound; an MLP may run again at once.

    Before and after: `tests/passes/texts/by_branch.before.txt`, `by_branch.after.txt`.
    """

    grade = "lossless"
    breaks = frozenset({Invariant.ALL_LAYERS_RUN})
    provides = frozenset({Invariant.LAYERS_BY_CALL, Invariant.BRANCHES_BY_CALL})

    def run(self, program: Program) -> Report:
        calls = branch_conditions(program, NESTED)
        every = (True,) * len(calls)
        program.facts.depth = Depth(every, NESTED, mlp=every)
        return Report(changed=len(calls))
