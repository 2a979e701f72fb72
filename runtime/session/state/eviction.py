"""What a session does about a recipe that evicts: when, how many tokens of each layer, what the graph gets."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt

from accel.ir.entries.compress import (
    held_of,
    keep_of,
    queries_of,
    query_positions_of,
    ranks_of,
    room_of,
)
from accel.ir.errors import InputError
from accel.runtime.backends.protocol import BackendSession
from accel.runtime.call import Arrays, Call
from accel.runtime.inputs.ints import Ints
from accel.runtime.rows import ByRow, PerRow, values
from accel.runtime.session.observers.observer import (
    Calls,
    CallWatcher,
    Capabilities,
    ModelParts,
    ObserverFactory,
    SessionObserver,
    Settled,
)
from accel.runtime.session.state._kv_plan import KvPlan, kv_plan
from accel.runtime.session.state._marks import Marks
from accel.runtime.session.state._rehearsal import (
    Listener,
    PromptLog,
    Question,
    blank,
    last_tokens,
    repeat,
)


class EvictionState(SessionObserver, CallWatcher):
    """The compressed part of one session's cache, in numbers.

    `base` [B]: tokens before it were compressed, those from it on lie in the recent slots.
    """

    base: PerRow
    _kept: Annotated[Ints, ByRow(axis=1)]  # [L,B]
    _calm: PerRow  # below these lengths there is nothing to drop
    _queries: Annotated[Arrays, ByRow(right=(1,))]
    _query_positions: Annotated[  # of each stage
        dict[int, Ints], ByRow(fill=-1, right=(1,), name="positions/")
    ]
    _last: PerRow  # token of each row; where guesses are made
    _prompt: Annotated[PromptLog, ByRow(name="log.")]
    _marks: Annotated[Marks, ByRow()]

    order = 20  # it may compress the slots that others know of
    moves_slots = True

    def __init__(self, plan: KvPlan, batch: int):
        self.plan = plan
        self._names = tuple(map(queries_of, plan.heads))
        self.base = self._calm = np.zeros(batch, np.int64)
        self._kept = np.zeros((len(plan.heads), batch), np.int64)
        self._queries = {}
        self._query_positions = {
            stage: np.zeros((batch, 0), np.int64) for stage in sorted({0, *plan.stages.values()})
        }
        self._last = np.full(batch, -1)
        self._prompt, self._marks = PromptLog.new(batch), Marks.new(batch)
        self._guesses = False  # in a fork that makes them
        self._question: Question | None = None  # of the call that runs
        self._before = values(self)  # the call

    @classmethod
    def for_model(cls, model: ModelParts) -> ObserverFactory | None:
        """Where the recipe drops tokens."""
        plan = kv_plan(model.tables, model.facts.kv, model.state)
        return None if plan is None or plan.facts.flush else ObserverFactory(lambda n: cls(plan, n))

    @property
    def capabilities(self) -> Capabilities:
        """Where it may be due after a token, no call of several is the same, and none can be taken back. All rows are
        compressed then, so that a row which joins makes others drop tokens when they would not alone. A prompt
        may run in chunks where nothing is due before its end, and scores read what is then cached and the last
        queries alone: what calls add up or note of tokens may depend on how many tokens a call has.
        """
        single = self.plan.when.single
        lost = single or self.plan.counts
        early = any(self.plan.when.due(moment, 1 << 40) for moment in ("part", "call"))
        return Capabilities(
            back=0 if lost else None,
            width=1 if single else None,
            trees=not lost,
            joins=not single,
            chunks=not (early or self.plan.counts or self.plan.notes),
        )

    @property
    def held_from(self) -> Ints:
        """See SessionObserver."""
        return self.base.copy()

    def begin(self, backend: BackendSession, call: Call) -> None:
        """See SessionObserver."""
        marks = self._marks.begun(call)
        self._before, self._question = values(self), None
        begins = marks.running & ~self._marks.running
        self._calm = np.where(begins, 0, self._calm)  # a prompt may have a budget of its own
        self._marks = marks
        asked = marks.question - call.before
        if "question" in self.plan.facts.marks and (asked >= 0).any():
            counts = call.after - call.before
            self._question = Question(call.tokens, np.maximum(asked, -1), counts, call.after)

    def mark(self, units: Any, question: Any, lengths: Any) -> bool:
        """See SessionObserver."""
        if not {"units", "question"}.intersection(self.plan.facts.marks):
            return False
        self._marks = self._marks.coming(units, question, lengths)
        return True

    def lost(self) -> bool:
        """See SessionObserver."""
        return self.plan.counts or self.base is not self._before["base"]

    def undo(self, backend: BackendSession, lengths: Ints) -> bool:
        """See SessionObserver."""
        vars(self).update(self._before)
        return False

    def before(self, backend: BackendSession, width: int) -> Collection[str]:
        """See SessionObserver."""
        return self._names if self._observes() else ()

    def after(self, tokens: Ints, positions: Ints, extra: Arrays) -> None:
        """See SessionObserver."""
        if self.plan.facts.lookahead:
            self._last = last_tokens(self._last, tokens, positions)
        asked = np.where(self._marks.running[:, None], positions, -1)  # those of prompts
        if self.plan.facts.repeats and (asked >= 0).any():
            self._prompt = self._prompt.add(tokens, asked)
        if extra and self._observes():
            queries = {name: extra[name] for name in self._names if name in extra}
            every = self.plan.when.single or self._guesses
            self.observe(queries, positions if every else asked)

    def rehearse(self, calls: Calls, moment: str, lengths: Ints) -> None:
        """See SessionObserver."""
        if self._guesses or not self.due(moment, lengths):
            return
        if moment == "part":
            self._ask(calls, lengths)
            return
        if self.plan.facts.repeats:
            blank(calls, self.plan.mass)
            repeat(calls, self._prompt)
        if self.plan.facts.lookahead:
            self._guess(calls)

    def _ask(self, calls: Calls, lengths: Ints) -> None:
        """Take the queries of the question that ends the call, run behind what rows hold of it so far."""
        if self._question is None:
            return
        tokens, counts = self._question.to_come(lengths)
        if counts.any():
            listener = Listener(self._names)
            calls.aside(tokens, counts, lengths, (listener,))
            for queries, positions in listener.heard:
                self.observe(queries, positions)

    def _guess(self, calls: Calls) -> None:
        """Take the queries of tokens that a fork, compressed by the prompt's own queries, decodes greedily."""
        other, start, lengths = calls.fork(), time.perf_counter(), calls.lengths
        try:
            (mine,) = (o for o in other.observers if isinstance(o, EvictionState))
            mine._guesses = True  # so that it observes single tokens, the prompt's last among them
            new = np.asarray(lengths > self.base, np.int64)  # rows that have a prompt's last token
            other.rewind(lengths - new)
            logits = other.run(self._last[:, None], new, True)
            other.end_prompt()
            for _ in range(min(self.plan.facts.lookahead, calls.max_context - int(lengths.max()))):
                logits = other.run(logits[:, 0].argmax(-1)[:, None], new, True)
            calls.count(other.calls, other.tokens, start)
            self._queries, self._query_positions = mine._queries, mine._query_positions
        finally:
            other.close()

    def settle(self, backend: BackendSession, moment: str, lengths: Ints) -> Settled | None:
        """See SessionObserver."""
        due = self.due(moment, lengths)
        if due:
            backend.compress(self, lengths)
            self.compressed(lengths)
            self._unheard(lengths)  # the queries of what ran behind have done their part
        if moment == "prompt":
            self.end_prompt(lengths)
        return Settled(1, self.base.copy() if self.plan.facts.moves else None) if due else None

    def _observes(self) -> bool:
        """Whether the queries of a call are needed."""
        asked = self.plan.when.single or self._guesses or bool(self._marks.running.any())
        return asked and self.plan.facts.observe > 0

    def end_prompt(self, lengths: Ints) -> None:
        """Single tokens from here on are generated ones, but those of rows that hold nothing yet."""
        self._marks = self._marks.ended(lengths)
        self._calm = np.zeros_like(lengths)
        self._prompt = PromptLog.new(len(self.base))

    def due(self, moment: str, lengths: Ints) -> bool:
        """Whether to compress now, and there is something to drop."""
        recent = lengths - self.base
        if moment == "call" and not self._marks.running.any():
            moment = "token"
        held = recent + self._kept.max(axis=0) if self.plan.when.whole else recent
        if not self.plan.when.due(moment, int(held.max())) or (lengths < self._calm).all():
            return False
        room = (self._tokens(lengths) - self._kept - recent).min(axis=0)
        self._calm = lengths + room + 1  # budgets do not shrink before
        return bool((room < 0).any())

    def compress_inputs(
        self, lengths: Ints, recent: Mapping[int, int], kept_slots: Mapping[int, int]
    ) -> Arrays:
        """Inputs of the entry, beside the state; of so many slots of each layer: `recent` ones, `kept_slots` ones."""
        inputs: Arrays = {"seen": lengths.copy()}
        tokens = self._tokens(lengths)
        for i, ((layer, heads), keep) in enumerate(
            zip(self.plan.heads.items(), tokens, strict=True)
        ):
            average, slots = int(keep.max()), recent[layer] + kept_slots[layer]
            inputs[keep_of(layer)] = keep
            most = self.plan.most(average, i, heads)
            inputs[ranks_of(layer)] = np.arange(max(1, min(most, slots)))
            if layer in self.plan.ragged:
                inputs[held_of(layer)] = np.arange(kept_slots[layer])
                room = self.plan.room(average, i, heads, slots)
                inputs[room_of(layer)] = np.arange(max(1, room))
        inputs |= self._marks.inputs(self.plan.facts.marks, lengths)
        if self.plan.facts.observe:
            width = max(where.shape[1] for where in self._query_positions.values())
            for stage, where in self._query_positions.items():
                short = width - where.shape[1]
                inputs[query_positions_of(stage)] = np.pad(
                    where, ((0, 0), (short, 0)), constant_values=-1
                )
            for name in map(queries_of, self.plan.heads):
                queries = self._queries[name]
                short = width - queries.shape[1]
                inputs[name] = np.pad(queries, ((0, 0), (short, 0), (0, 0), (0, 0)))
        return inputs

    def compressed(self, lengths: Ints) -> None:
        """All tokens so far were looked at."""
        self._kept = np.minimum(self._tokens(lengths), self._kept + lengths - self.base)
        self.base = self._kept[0].copy() if self.plan.facts.moves else lengths.copy()
        self._calm = np.zeros_like(lengths)
        if self.plan.facts.moves:  # queries before were rotated for other positions
            gone = (self.base < lengths)[:, None]
            self._query_positions = {
                n: np.where(gone, -1, where) for n, where in self._query_positions.items()
            }
            self._marks = self._marks.moved(lengths, self.base)
            if self._question is not None:
                self._question = self._question.moved(self.base - lengths)

    def forget(self, rows: npt.NDArray[np.bool_]) -> None:
        """Rows start anew."""
        self.base = np.where(rows, 0, self.base)
        self._kept = np.where(rows, 0, self._kept)
        self._calm = np.where(rows, 0, self._calm)
        self._query_positions = {
            n: np.where(rows[:, None], -1, where) for n, where in self._query_positions.items()
        }
        self._prompt, self._marks = self._prompt.forget(rows), self._marks.forget(rows)

    def check(self, new_lengths: Ints, lengths: Ints) -> None:
        """Rows may start anew, or go back to where they were compressed; where tokens are counted, not at all."""
        low = lengths if self.plan.counts else self.held_from
        if (short := (new_lengths < low) & (new_lengths > 0)).any():
            row = int(short.argmax())
            why = (
                "the recipe accumulates attention per token"
                if self.plan.counts
                else "older tokens were evicted or merged"
            )
            raise InputError(
                f"cannot rewind row {row} to {new_lengths[row]}: {why}; give {low[row]}..{lengths[row]}, or 0"
            )

    def rewind(self, backend: BackendSession, new_lengths: Ints, lengths: Ints) -> bool:
        """See SessionObserver."""
        anew = np.asarray(new_lengths == 0)
        backend.forget(anew)
        self.forget(anew)
        self.rewound(new_lengths)
        return False

    def rewound(self, lengths: Ints) -> None:
        """Rows go back to `lengths` [B] tokens."""
        self._unheard(lengths)
        self._prompt, self._marks = self._prompt.rewound(lengths), self._marks.rewound(lengths)

    def _unheard(self, lengths: Ints) -> None:
        """Queries of tokens from `lengths` [B] on are forgotten. Those that they had pushed out do not come
        back: until as many new ones came, scores look with fewer.
        """
        self._query_positions = {
            n: np.where(where >= lengths[:, None], -1, where)
            for n, where in self._query_positions.items()
        }

    def observe(self, queries: Arrays, positions: Ints) -> None:
        """Take the queries [B,T,H,D] of a call at these positions [B,T] (-1: padding), of all layers or some."""
        layers = {queries_of(layer): self.plan.stages.get(layer, 0) for layer in self.plan.heads}
        newest, where = dict(self._queries), dict(self._query_positions)
        for stage, before in self._query_positions.items():
            names = [name for name in queries if layers[name] == stage]
            if not names:
                continue
            both = np.concatenate([before, positions], axis=1)
            last = np.argsort(both, axis=1, kind="stable")[:, -self.plan.facts.observe :]
            for name in names:
                new = queries[name]
                joined = np.concatenate([self._queries.get(name, new[:, :0]), new], axis=1)
                newest[name] = np.take_along_axis(joined, last[:, :, None, None], axis=1)
            where[stage] = np.take_along_axis(both, last, axis=1)
        self._queries, self._query_positions = newest, where

    def _tokens(self, lengths: Ints) -> Ints:
        """What each layer's heads keep of each row [L,B], on average."""
        layers = len(self.plan.heads)
        both = list(zip(lengths.tolist(), self._marks.prompts(lengths).tolist(), strict=True))
        found = [
            [self.plan.tokens(seen, i, prompt) for seen, prompt in both] for i in range(layers)
        ]
        return np.array(found, np.int64)
