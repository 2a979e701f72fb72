"""What a session does with a prompt whose upper layers only its last token needs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from accel.ir.entries.fill import FILL
from accel.ir.prefill import Fill
from accel.runtime.call import Logits
from accel.runtime.inputs.calls import row_parts
from accel.runtime.inputs.ints import Ints
from accel.runtime.session.observers.observer import (
    Calls,
    Capabilities,
    ModelParts,
    ObserverFactory,
    PromptRunner,
    SessionObserver,
)


class PromptFill(SessionObserver, PromptRunner):
    """Where only the last logits are asked for, runs all but the last tokens of each row by the entry `fill`.

    `last`: how many tokens the step runs, those whose queries an eviction reads among them, and as many as read
    everything where fewer would choose what they read.
    """

    capabilities = Capabilities(chunks=False)

    order = 30

    def __init__(self, plan: Fill, last: int):
        self.plan, self.last = plan, last

    @classmethod
    def for_model(cls, model: ModelParts) -> ObserverFactory | None:
        """Where the recipe has upper layers left out."""
        plan, kv = None if model.facts.prefill is None else model.facts.prefill.fill, model.facts.kv
        if plan is None:
            return None
        # an eviction takes calls of one token for generated ones, a selection those of a few
        last = 1 if kv is None else max(2, kv.observe)
        if (selection := model.facts.selection) is not None:
            last = max(last, selection.width + 1)
            plan = replace(plan, least=max(plan.least, selection.width + 1))
        return ObserverFactory(lambda batch: cls(plan, last))

    def run(
        self, calls: Calls, tokens: Ints, counts: Ints | None, last_only: bool, prompt: bool
    ) -> Logits | None:
        """See SessionObserver. Padding is written behind what a row holds, and its next tokens then over it."""
        if not last_only:
            return None
        if counts is None:
            counts = np.full(len(tokens), tokens.shape[1], np.int64)
        first, fills = calls.lengths, np.maximum(counts - self.last, 0)
        slots = first - calls.base
        longest = int(fills.max())
        if longest < self.plan.least or (self.plan.whole and first.any()):
            return None
        chunk = longest if self.plan.whole else calls.chunk
        for start, end in row_parts(fills, chunk):
            columns = start[:, None] + np.arange(int((end - start).max()))
            part = np.take_along_axis(tokens, np.minimum(columns, tokens.shape[1] - 1), axis=1)
            real = columns < end[:, None]
            positions = np.where(real, first[:, None] + columns, -1)
            calls.part(FILL.name, part, positions, slots + start, int(real.sum()))
        left = counts - fills
        columns = fills[:, None] + np.arange(int(left.max()))
        real = columns < counts[:, None]
        part = np.take_along_axis(tokens, np.minimum(columns, tokens.shape[1] - 1), axis=1)
        positions = np.where(real, first[:, None] + columns, -1)
        rows = np.maximum(left - 1, 0)[:, None]
        logits = calls.step(part, positions, slots + fills, rows, int(real.sum()))
        return np.where((counts > 0)[:, None, None], logits, 0)
