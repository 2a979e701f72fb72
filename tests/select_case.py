"""Sessions whose layers choose pages, on the eager target, without the checks of a whole build."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from accel.ir.axis import Axis
from accel.ir.program import Program
from accel.ir.spec import verify
from accel.runtime.session.session import Session

from .session_case import session_of

AXIS = Axis("kv.select", "accel.passes.kv.select")


def built(name: str, **options: Any) -> Any:
    return AXIS.build(name, **{**AXIS.small(name), **options})


@dataclass
class Selecting:
    """A program over state (conftest's `stateful`) with a method's pass; none: without."""

    program: Program
    method: Any = None

    def __post_init__(self) -> None:
        if self.method is not None:
            report = self.method.run(self.program)
            assert report.changed, report.refused
            verify(self.program, type(self.method).__name__)

    def session(self, batch: int = 1, wrap: Any = None) -> Session:
        return session_of(self.program, batch, wrap=wrap)

    def tokens(self, *shape: int, seed: int = 0) -> np.ndarray:
        return np.random.default_rng(seed).integers(3, self.program.facts.vocab_size, shape)


def singles(session: Session, tokens: np.ndarray) -> np.ndarray:
    """Logits of single tokens [B,T]."""
    return np.concatenate([session.run(tokens[:, [i]]) for i in range(tokens.shape[1])], axis=1)


def close(a: Any, b: Any) -> None:
    np.testing.assert_allclose(a, b, atol=2e-4, rtol=1e-4)
