"""What a session does to a prompt that a recipe filters: the model sees the tokens that are worth most."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing

import numpy as np

from accel.ir.prefill import Pick, Prefill
from accel.runtime.backends.protocol import BackendSession
from accel.runtime.inputs.ints import Ints
from accel.runtime.session.observers.observer import (
    Calls,
    Capabilities,
    ModelParts,
    ObserverFactory,
    PromptRunner,
    SessionObserver,
)
from accel.runtime.session.prompt._prompt_parts import Part, picks, taken


def unseen(plan: Prefill | None, count: int) -> int:
    """How many fewer slots than tokens the model's own cache has of a prompt of `count`; below 0: more."""
    return 0 if plan is None else count - plan.cached_slots(count)


class PromptFilter(SessionObserver, PromptRunner):
    """Scores a prompt with the entry `filter`, over an empty cache that is closed after."""

    capabilities = Capabilities(chunks=False)

    order = 30

    def __init__(self, plan: Pick, empty: Callable[[int], BackendSession]):
        self.plan = plan
        self._empty = empty

    @classmethod
    def for_model(cls, model: ModelParts) -> ObserverFactory | None:
        """Where the recipe filters prompts."""
        plan = None if model.facts.prefill is None else model.facts.prefill.filter
        return (
            None if plan is None else ObserverFactory(lambda batch: cls(plan, model.open_session))
        )

    def shorten(self, calls: Calls, tokens: Ints, counts: Ints) -> tuple[Ints, Ints] | None:
        """See SessionObserver."""
        longest, chunk = int(counts.max()), calls.chunk
        if all(self.plan.tokens_kept(int(n)) == n for n in counts):
            return None
        start = time.perf_counter()
        with closing(self._empty(calls.batch)) as backend:
            backend.resize(-(-longest // chunk) * chunk)
            every = np.arange(tokens.shape[1])
            positions = np.where(every < counts[:, None], every, -1)
            part = Part("filter", backend, positions, counts, chunk, self.plan.observe)
            worth = part.run({"tokens": tokens})["scores"]
        calls.count(part.calls, 0, start)
        return taken(
            tokens,
            [picks(self.plan, row[:n]) for row, n in zip(worth, counts, strict=True)],
        )
