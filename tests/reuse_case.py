"""Sessions over shared blocks on the eager target, without the checks of a whole build."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from accel.ir.program import Program
from accel.ir.spec import verify
from accel.ir.state import Part
from accel.passes.kv._shared.paged import Paged
from accel.runtime.backends.eager import EagerBackend
from accel.runtime.session.prompt._pool import Pool
from accel.runtime.session.prompt.prefix_cache import PrefixCache, pool_of
from accel.runtime.session.session import Session
from accel.runtime.session.state.recurrent_history import RecurrentHistory

from .session_case import session_of

BLOCK = 4


@dataclass
class Shared:
    """A program that reads blocks, with a pool of its own, and the same program without."""

    program: Program
    plain: Program
    blocks: int = 64
    pool: Pool = field(init=False)

    def __post_init__(self) -> None:
        Paged(BLOCK).run(self.program)
        verify(self.program, "Paged")
        self.anew(self.blocks)

    def anew(self, blocks: int) -> None:
        """Another pool, empty."""
        table = {"use": "paged-prefix", "block": BLOCK, "blocks": blocks}
        found = pool_of({"kv.reuse": table}, self.program.state, EagerBackend(self.program).pool)
        assert found is not None
        self.pool = found

    def session(self, batch: int = 1, wrap: Any = None) -> Session:
        backend: Any = EagerBackend(self.program).open_session(batch)
        facts = self.program.facts
        recurrent = {v.name: v.fill for v in self.program.state if v.part is Part.RECURRENT}
        observers: list[Any] = [RecurrentHistory(batch)] if recurrent else []
        observers.append(PrefixCache(self.pool, batch, recurrent))
        return Session(
            wrap(backend) if wrap else backend,
            batch,
            observers,
            vocab_size=facts.vocab_size,
            max_context=facts.max_context,
        )

    def dense(self, batch: int = 1) -> Session:
        return session_of(self.plain, batch)

    def tokens(self, *shape: int, seed: int = 0) -> Any:
        return np.random.default_rng(seed).integers(3, self.program.facts.vocab_size, shape)


def shared(stateful: Any, name: str = "llama", **options: Any) -> Shared:
    return Shared(stateful(name), stateful(name), **options)


def named(text: str, *words: str) -> bool:
    return all(re.search(re.escape(word), text) for word in words)
