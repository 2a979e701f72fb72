"""What a session does with a prompt that several ranks share."""

from __future__ import annotations

import time
from typing import Any, Self

import numpy as np

from accel.ir.axis import host_method
from accel.ir.facts import Facts
from accel.ir.state import POSITIONS, Part, name_of
from accel.runtime.call import Arrays, Logits
from accel.runtime.inputs.ints import Ints
from accel.runtime.prefill.exchange.processes import Crew
from accel.runtime.prefill.exchange.rank import Done, in_turns, jobs_of
from accel.runtime.prefill.ranks import Base
from accel.runtime.session.observers.observer import (
    Calls,
    ModelParts,
    ObserverFactory,
    PromptRunner,
    SessionObserver,
)

_PARTS = (Part.KEYS, Part.VALUES)


class PromptRanks(SessionObserver, PromptRunner):
    """Lets ranks run the calls of many tokens whose last logits are asked for, and writes their keys and values.

    Each row is shared by itself. The cache before the call is the ranks' too: what each holds of it is sent to it.
    `exchanged`: bytes that ranks sent each other. `gathered`: bytes of keys and values between them and the session.
    """

    order = 35

    def __init__(self, method: Base, facts: Facts, crew: Crew | None):
        self.method, self.facts, self.crew = method, facts, crew
        self.exchanged = self.gathered = 0
        self._adapted = False

    @classmethod
    def for_model(cls, model: ModelParts) -> ObserverFactory | None:
        """Where the recipe shares prompts. Processes need the artifact's files; without, ranks take turns."""
        if model.facts.prefill is None or model.facts.prefill.ranks is None:
            return None
        method: Base = host_method(model.tables, "prefill.ranks", "cp-ring")
        crew = None
        if method.processes and method.ranks > 1 and model.path is not None:
            crew = Crew(model.path, method.ranks, model.threads)
        return ObserverFactory(
            lambda batch: cls(method, model.facts, crew), close=None if crew is None else crew.close
        )

    @property
    def stats(self) -> dict[str, float]:
        """See SessionObserver."""
        return {"exchanged_bytes": self.exchanged, "gathered_bytes": self.gathered}

    def adapted(self, numbers: Any) -> None:
        """Processes know no adapters, so such rows run in one piece."""
        self._adapted = any(numbers)

    def copy(self) -> Self:
        """Of its own figures."""
        other = type(self)(self.method, self.facts, self.crew)
        other._adapted = self._adapted
        return other

    def run(
        self, calls: Calls, tokens: Ints, counts: Ints | None, last_only: bool, prompt: bool
    ) -> Logits | None:
        """See SessionObserver. Rows are written when all are known, so a call that fails changes nothing."""
        if counts is None:
            counts = np.full(len(tokens), tokens.shape[1], np.int64)
        least = max(self.method.least, self.method.fewest)
        if not last_only or counts.min() < least or (self.crew is not None and self._adapted):
            return None
        before, start = calls.lengths, time.perf_counter()
        calls.need([int((before + counts).max())])
        rows = [
            self._shared(calls, row, tokens[row, : counts[row]], int(before[row]))
            for row in range(len(tokens))
        ]
        logits = np.zeros((len(tokens), 1, calls.vocab_size), np.float32)
        positions = np.full(tokens.shape, -1, np.int64)
        for row, (queries, done) in enumerate(rows):
            _write(calls.backend.buffers(), row, queries, done)
            (logits[row],) = (one.logits[0] for one in done if one.logits is not None)
            positions[row, : counts[row]] = before[row] + np.arange(counts[row])
            self.exchanged += sum(one.sent for one in done)
        calls.heard(tokens, positions)
        made = sum(one.calls for _, done in rows for one in done)
        calls.count(made, int(counts.sum()), start)
        return logits

    def _shared(
        self, calls: Calls, row: int, tokens: Ints, first: int
    ) -> tuple[tuple[Ints, ...], list[Done]]:
        """Run the tokens [T] of a row behind `first` others: whose they were, and what came of them."""
        plan_of, layers = self.facts.prefill, self.facts.layers
        assert plan_of is not None and plan_of.ranks is not None
        heads, groups = layers[0].num_heads, layers[0].num_kv_heads
        plan = self.method.plan(tokens.size, first, heads, groups)
        buffers = calls.backend.buffers()
        cached = [
            {
                str(part): buffers[name][row : row + 1, :, :first]
                for part in _PARTS
                if (name := name_of(part, layer)) in buffers
            }
            for layer in range(len(layers))
        ]
        jobs = list(jobs_of(plan, plan_of.ranks.forms, tokens, first, cached))
        done = in_turns(jobs, calls.backend.part) if self.crew is None else self.crew.run(jobs)
        given = sum(a.nbytes for job in jobs for layer in job.cached for a in layer.values())
        taken = sum(a.nbytes for one in done for layer in one.keys for a in layer.values())
        self.gathered += given + taken
        return plan.queries, done


def _write(buffers: Arrays, row: int, queries: tuple[Ints, ...], done: list[Done]) -> None:
    """Let a row's slots hold the keys and values of the ranks' tokens, at their positions; slot i holds token i."""
    for positions, one in zip(queries, done, strict=True):
        buffers[POSITIONS][row, positions] = positions
        for layer, arrays in enumerate(one.keys):
            for part, array in arrays.items():
                buffers[name_of(Part(part), layer)][row][:, positions] = array[0]
