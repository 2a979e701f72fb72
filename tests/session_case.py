"""Sessions over a program on the eager target, without the checks of a whole build."""

from __future__ import annotations

from typing import Any

from accel.ir.program import Program
from accel.runtime.backends.eager import EagerBackend
from accel.runtime.session.observers import observer_factories
from accel.runtime.session.observers.observer import ModelParts
from accel.runtime.session.session import Session


def session_of(
    program: Program, batch: int = 1, *, tables: Any = None, wrap: Any = None
) -> Session:
    """With the observers that the program and a recipe's `tables` ask for; `wrap`: around the backend session."""
    engine, facts = EagerBackend(program), program.facts
    parts = ModelParts(
        facts, tables or {}, program.state, program.entries, engine.open_session, engine.pool
    )
    backend: Any = engine.open_session(batch)
    return Session(
        wrap(backend) if wrap else backend,
        batch,
        [factory.open(batch) for factory in observer_factories(parts)],
        vocab_size=facts.vocab_size,
        max_context=facts.max_context,
    )
