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
    """Runs the second model over the cache of a prompt, and the model over the `count` embeddings that it gives.

    The second model writes its own keys and values into the slots behind the prompt, and the model then writes over
    them, so it needs no cache of its own.
    """

    capabilities = Capabilities(chunks=False)

    order = 10

    def __init__(self, count: int):
        self.count = count

    @classmethod
    def for_model(cls, model: ModelParts) -> ObserverFactory | None:
        """Where the recipe extends prompts."""
        count = 0 if model.facts.prefill is None else model.facts.prefill.latents
        return ObserverFactory(lambda batch: cls(count)) if count else None

    def prompt(self, calls: Calls, tokens: Ints, counts: Ints) -> None:
        """See SessionObserver. Raises InputError where the prompt leaves no room."""
        longest = int(counts.max())
        if longest + self.count > calls.max_context:
            raise InputError(
                f"a prompt of {longest} tokens and {self.count} latents are more than max_context = "
                f"{calls.max_context}; give a shorter prompt, or build with more: max_context=…"
            )

    def extend(self, calls: Calls) -> Logits:
        """See SessionObserver. Rows without a prompt get nothing."""
        start, lengths = time.perf_counter(), calls.lengths
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
        calls.lengths = lengths + self.count * real
        calls.count(2, 0, start)
        return np.where(real[:, None, None], found["logits"], np.float32(0))
