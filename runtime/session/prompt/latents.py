"""What a session adds behind a prompt: embeddings that a second model makes of the cache."""

from __future__ import annotations

import time

import numpy as np

from accel.ir.entries.augment import COPROCESS, EMBEDDED, LATENTS
from accel.ir.errors import InputError
from accel.runtime.call import Logits
from accel.runtime.inputs.ints import Ints
from accel.runtime.session.observers.observer import (
    Calls,
    Capabilities,
    ModelParts,
    ObserverFactory,
    PromptRunner,
    SessionObserver,
)


class PromptLatents(SessionObserver, PromptRunner):
    """Runs the second model over the cache of a prompt but for its last `behind` tokens, the model over the `count`
    embeddings that it gives, and then over those tokens.

    The second model writes its own keys and values into the slots behind the prompt, and the model then writes over
    them, so it needs no cache of its own.
    """

    capabilities = Capabilities(chunks=False)

    order = 10

    def __init__(self, count: int, behind: int):
        self.count, self.behind = count, behind
        self._tokens: Ints = np.zeros((0, 0), np.int64)  # of the prompt

    @classmethod
    def for_model(cls, model: ModelParts) -> ObserverFactory | None:
        """Where the recipe extends prompts."""
        plan = model.facts.prefill
        if plan is None or not plan.latents:
            return None
        return ObserverFactory(lambda batch: cls(plan.latents, plan.behind))

    def prompt(self, calls: Calls, tokens: Ints, counts: Ints) -> None:
        """See SessionObserver. Raises InputError where the prompt leaves no room."""
        longest = int(counts.max())
        if longest + self.count > calls.max_context:
            raise InputError(
                f"a prompt of {longest} tokens and {self.count} latents are more than max_context = "
                f"{calls.max_context}; give a shorter prompt, or build with more: max_context=…"
            )
        self._tokens = tokens

    def extend(self, calls: Calls) -> Logits:
        """See SessionObserver. Rows without a prompt get nothing."""
        start, held = time.perf_counter(), calls.lengths
        again = np.minimum(self.behind, np.maximum(held - 1, 0))  # a token stays before
        lengths = held - again
        real, columns = lengths > 0, np.arange(self.count)
        positions = np.where(real[:, None], lengths[:, None] + columns, -1)
        slots = lengths - calls.base
        calls.need([int(slots.max()) + self.count])
        numbers = np.broadcast_to(columns, positions.shape)
        given = {"positions": positions, "slots": slots}
        backend = calls.backend
        made = backend.part(COPROCESS, {**given, "tokens": numbers, "rows": numbers})
        last = np.full((calls.batch, 1), self.count - 1)
        found = backend.part(EMBEDDED, {**given, "stream": made[LATENTS], "rows": last})
        calls.count(2, 0, start)
        logits = np.where(real[:, None, None], found["logits"], np.float32(0))
        if again.any():
            columns = lengths[:, None] + np.arange(int(again.max()))
            tokens = np.take_along_axis(
                self._tokens, np.minimum(columns, self._tokens.shape[1] - 1), axis=1
            )
            behind = calls.aside(tokens, again, lengths + self.count)
            logits = np.where((again > 0)[:, None, None], behind, logits)
        calls.lengths = held + self.count * real
        return logits
