"""A captured model as a recipe's passes over the state find it: what parts are measured and trained beside."""

from __future__ import annotations

from torch import fx

from accel.compiler.pipeline import pipeline
from accel.ir.program import Program
from accel.passes import Pass, run
from accel.passes.kv._shared.tables import appended, attentions
from accel.passes.state.head import Head


def keys_of(program: Program) -> dict[int, fx.Node]:
    """What each layer appends to its cache of keys."""
    return {layer: appended(node) for layer, node in attentions(program).items()}


def over_state(program: Program) -> Program:
    """The program as a recipe's passes over the state find it."""
    steps = pipeline(program.facts.encoder is not None)
    run(program, steps[: shared(steps)])
    return program


def shared(steps: list[Pass]) -> int:
    """How many of a build's passes come before a recipe's own."""
    return 1 + next(i for i, step in enumerate(steps) if isinstance(step, Head))
