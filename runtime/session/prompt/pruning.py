"""What a session knows of a prompt of which deeper layers see some tokens only."""

from __future__ import annotations

import time
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt

from accel.ir.errors import InputError
from accel.ir.prefill import Pick
from accel.runtime.backends.protocol import BackendSession
from accel.runtime.call import Logits
from accel.runtime.inputs.ints import Ints
from accel.runtime.rows import ByRow, PerRow
from accel.runtime.session.observers.observer import (
    Calls,
    CallWatcher,
    Capabilities,
    ModelParts,
    ObserverFactory,
    PromptRunner,
    SessionObserver,
)
from accel.runtime.session.prompt._prompt_parts import Part, Scores, picks, taken


class PromptPruning(SessionObserver, CallWatcher, PromptRunner):
    """What a session knows of tokens that the layers after each stage do not hold.

    `dropped` [stages,B]: how many. `ends` [B]: tokens of a prompt that was pruned; 0: none was.
    """

    dropped: Annotated[Ints, ByRow(axis=1)]
    ends: PerRow

    capabilities = Capabilities(chunks=False)

    order = 30
    moves_slots = True

    def __init__(self, plan: tuple[Pick, ...], batch: int):
        self.plan = plan
        self.dropped = np.zeros((len(plan), batch), np.int64)
        self.ends = np.zeros(batch, np.int64)

    @classmethod
    def for_model(cls, model: ModelParts) -> ObserverFactory | None:
        """Where the recipe prunes prompts between layers."""
        stages = () if model.facts.prefill is None else model.facts.prefill.stages
        return ObserverFactory(lambda batch: cls(stages, batch)) if stages else None

    @property
    def held_from(self) -> Ints:
        """See SessionObserver."""
        return self.ends.copy()

    def prunes(self, counts: Ints) -> bool:
        """Whether prompts of so many tokens are."""
        return any(
            plan.always or plan.tokens_kept(int(n)) < n for plan in self.plan for n in counts
        )

    def slots(self, ends: Ints) -> list[int]:
        """How many slots the layers after each stage need where those before need `ends` [B]."""
        return [int((ends - gone).max()) for gone in self.dropped]

    def pin(self, backend: BackendSession) -> None:
        """What was kept of the prompt lies elsewhere: the slots of all layers begin at the same token."""
        self.dropped = np.zeros_like(self.dropped)

    def check(self, new_lengths: Ints, lengths: Ints) -> None:
        """Raises InputError where rows would go back to within a pruned prompt."""
        if (bad := (new_lengths < self.ends) & (new_lengths > 0)).any():
            row = int(bad.argmax())
            raise InputError(
                f"cannot rewind row {row} to {new_lengths[row]}: deeper layers dropped tokens of its prompt "
                f"of {self.ends[row]} tokens, and their selection for a shorter prompt is "
                f"unknown; give {self.ends[row]} "
                "or more, or 0"
            )

    def rewind(self, backend: BackendSession, new_lengths: Ints, lengths: Ints) -> bool:
        """See SessionObserver."""
        if (anew := (new_lengths == 0) & (self.ends > 0)).any():
            backend.forget(anew)
        self.dropped[:, new_lengths == 0] = 0
        self.ends[new_lengths == 0] = 0
        return False

    def room(self, counts: Ints) -> list[int]:
        """How many slots prompts of `counts` [B] tokens take in each part."""
        left, most = counts, [int(counts.max())]
        for plan in self.plan:
            left = np.minimum(left, [plan.tokens_kept(int(n)) for n in counts])
            most.append(int(left.max()))
        return most

    def prompt(self, calls: Calls, tokens: Ints, counts: Ints) -> Logits | None:
        """Run prompts that are long enough part by part; see SessionObserver."""
        if not self.prunes(counts):
            return None
        with calls.whole_prompt(tokens, counts):
            return self._run(calls, tokens, counts)

    def _run(self, calls: Calls, tokens: Ints, counts: Ints) -> Logits:
        start = time.perf_counter()
        calls.need(self.room(counts))
        backend, chunk, listen = calls.backend, calls.chunk, calls.observe
        backend.forget(np.ones(len(tokens), bool))
        every = np.arange(tokens.shape[1])
        positions = np.where(every < counts[:, None], every, -1)
        inputs: dict[str, npt.NDArray[Any]] = {"tokens": tokens}
        left, made, dropped = counts, 0, []
        before: Scores = np.zeros((len(tokens), 1), np.float32)
        for index, plan in enumerate(self.plan):
            part = Part(f"prompt.{index}", backend, positions, counts, chunk, plan.observe, listen)
            out = part.run(inputs, before)
            made += part.calls
            rows = zip(out["scores"], left, counts, strict=True)
            picked = [picks(plan, row[:n], int(count)) for row, n, count in rows]
            before, _ = taken(out["scores"], picked)
            stream, left = taken(out["stream_out"], picked)
            positions, _ = taken(positions, picked, -1)
            dropped.append(counts - left)
            inputs = {"stream": stream}
        name = f"prompt.{len(self.plan)}"
        part = Part(name, backend, positions, counts, chunk, listen=listen)
        logits: Logits = part.run(inputs)["logits"] * (counts > 0)[:, None, None]
        self.dropped = np.stack(dropped)
        whole = any(plan.always for plan in self.plan)
        self.ends = np.where(self.dropped.any(0) | whole, counts, 0)
        calls.count(made + part.calls, int(counts.sum()), start)
        calls.lengths = counts.copy()
        return logits
