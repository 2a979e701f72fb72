"""What a session does with a prompt whose stretches read some of the keys before them."""

from __future__ import annotations

import numpy as np

from accel.ir.entries.sparse import SPARSE
from accel.ir.prefill import Segments
from accel.ir.sizes import FEW
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


class PromptSegments(SessionObserver, PromptRunner):
    """Runs a long prompt segment by segment: the last of each row by the step, those before it by `sparse`."""

    capabilities = Capabilities(chunks=False)

    order = 30

    def __init__(self, plan: Segments):
        self.plan = plan

    @classmethod
    def for_model(cls, model: ModelParts) -> ObserverFactory | None:
        """Where the recipe has prompts attend sparsely."""
        plan = None if model.facts.prefill is None else model.facts.prefill.segments
        return None if plan is None else ObserverFactory(lambda batch: cls(plan))

    def run(
        self, calls: Calls, tokens: Ints, counts: Ints | None, last_only: bool, prompt: bool
    ) -> Logits | None:
        """See SessionObserver. To the call that a row does not go by it is padding, written behind its segment."""
        plan = self.plan
        if not prompt:
            return None
        if counts is None:
            counts = np.full(len(tokens), tokens.shape[1], np.int64)
        longest = int(counts.max())
        if longest <= plan.threshold:
            return None
        final = self._final(counts)
        out: Logits | None = None
        for start in range(0, longest, plan.tokens):
            last = (final == start) & (counts > 0)
            ends = np.where(start < final, start + plan.tokens, counts)
            between = (start < final) & (start >= plan.threshold)
            for rows, sparse in ((((start < final) | last) & ~between, False), (between, True)):
                if not rows.any():
                    continue
                columns = np.arange(start, int(ends[rows].max()))
                real = rows[:, None] & (columns < ends[:, None])
                positions = np.where(real, columns, -1)
                slots = np.where(rows, start, ends)
                part = tokens[:, columns]
                if sparse:
                    calls.part(SPARSE.name, part, positions, slots, int(real.sum()))
                    continue
                wanted = np.where(rows & last, counts - start - 1, 0)[:, None]
                logits = calls.step(part, positions, slots, wanted, int(real.sum()))
                out = np.zeros_like(logits) if out is None else out
                out[rows & last] = logits[rows & last]
        assert out is not None  # the last segment goes by the step
        return out

    def _final(self, counts: Ints) -> Ints:
        """Where the last segment of each row begins [B]. It takes what is left where that is so little that tokens
        would choose what they read (`kv.select`).
        """
        size = self.plan.tokens
        final = np.maximum(counts - 1, 0) // size * size
        short = (counts - final <= FEW) & (final > 0) & (size > FEW)
        return np.where(short, final - size, final)
