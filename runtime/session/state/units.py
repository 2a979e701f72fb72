"""What a session does about a recipe whose attention reads units: which tokens are grouped, and when."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np

from accel.ir.entries.group import GROUP
from accel.ir.sizes import FEW
from accel.ir.units import Units
from accel.runtime.backends.protocol import BackendSession
from accel.runtime.call import Arrays, Call
from accel.runtime.inputs.ints import Bools, Ints
from accel.runtime.rows import ByRow, PerRow, PerSession
from accel.runtime.session.observers.observer import (
    CallWatcher,
    Capabilities,
    ModelParts,
    ObserverFactory,
    SessionObserver,
    Settled,
)
from accel.runtime.session.state._marks import Marks


@dataclass(frozen=True)
class _Prompt:
    """One that ended at `end`, when tokens before `grouped` were in units and segments were counted from `origin`."""

    end: int
    grouped: int
    origin: int


class UnitGroups(SessionObserver, CallWatcher):
    """Which tokens of each row lie in units.

    Those of a prompt do when it ends: its end is the row's `origin`. Then segments of `plan.every` tokens follow. A
    segment is grouped after a call of up to FEW tokens that makes it whole, or before the next; only such calls read
    units. What a rewind
    takes tokens of is grouped again when it is whole again; the step knows by the origin which tokens are in units.
    """

    _lengths: PerRow
    _grouped: PerRow
    _origin: PerRow
    _known: PerRow  # what the state says of the origin
    _few: Annotated[bool, PerSession()]  # whether the last call reads units
    _prompts: Annotated[tuple[tuple[_Prompt, ...], ...], ByRow()]
    _marks: Annotated[Marks, ByRow()]  # as the caller says; with `plan.marks`
    _ends: Annotated[Bools, ByRow()]  # [B,N], which tokens end something

    def __init__(self, plan: Units, batch: int):
        self.plan = plan
        self._lengths = np.zeros(batch, np.int64)
        self._grouped = self._origin = self._known = np.full(batch, plan.sinks, np.int64)
        self._few = False
        self._prompts = ((),) * batch
        self._marks = Marks.new(batch)
        self._ends = np.zeros((batch, 0), np.bool_)
        self._before = self._marks  # the call

    @classmethod
    def for_model(cls, model: ModelParts) -> ObserverFactory | None:
        """Where the recipe selects units."""
        plan = model.facts.units
        return ObserverFactory(lambda n: cls(plan, n)) if plan is not None else None

    @property
    def capabilities(self) -> Capabilities:
        """Calls of more tokens read everything."""
        return Capabilities(width=FEW, trees=False, chunks=False)

    def mark(self, units: Any, question: Any, lengths: Any) -> bool:
        """See SessionObserver."""
        if not self.plan.marks or units is None:
            return False
        self._marks = self._marks.coming(units, question, lengths)
        return True

    def begin(self, backend: BackendSession, call: Call) -> None:
        """See SessionObserver."""
        marks = self._marks.begun(call) if self.plan.marks else self._marks
        self._before, self._marks = self._marks, marks

    def before(self, backend: BackendSession, width: int) -> Collection[str]:
        """Group what is due, where the call reads units."""
        self._few = width <= FEW
        if self._few:
            self._segments(backend)
            if (self._known != self._origin).any():
                self._group(backend, np.where(self._known != self._origin, 0, -1), self._origin)
        return ()

    def after(self, tokens: Ints, positions: Ints, extra: Arrays) -> None:
        """See SessionObserver."""
        self._lengths = np.maximum(self._lengths, positions.max(axis=1) + 1)
        if self.plan.ends:
            wide = max(0, int(self._lengths.max()) - self._ends.shape[1])
            ends = np.pad(self._ends, ((0, 0), (0, wide)))
            rows, columns = np.nonzero(positions >= 0)
            ends[rows, positions[rows, columns]] = np.isin(tokens[rows, columns], self.plan.ends)
            self._ends = ends

    def settle(self, backend: BackendSession, moment: str, lengths: Ints) -> Settled | None:
        """A prompt's tokens are grouped when it ends; of a short one that follows others, as generated ones are."""
        if moment == "call" and self._few:
            self._segments(backend)
        if moment == "prompt":
            new = lengths - self._grouped
            first = self._grouped == self.plan.sinks
            due = np.where(first, new > 0, new >= self.plan.every)
            if due.any():
                self._prompts = tuple(
                    (*held, _Prompt(int(n), int(g), int(o))) if d else held
                    for held, d, n, g, o in zip(
                        self._prompts, due, lengths, self._grouped, self._origin, strict=True
                    )
                )
                origin = np.where(due, lengths, self._origin)
                self._group(backend, np.where(due, lengths, -1), origin)
        return None

    def undo(self, backend: BackendSession, lengths: Ints) -> bool:
        """See SessionObserver."""
        self._marks = self._before
        self._back(lengths)
        return False

    def rewind(self, backend: BackendSession, new_lengths: Ints, lengths: Ints) -> bool:
        """See SessionObserver."""
        self._back(new_lengths)
        return False

    def numbers(self, backend: BackendSession) -> Arrays:
        """See SessionObserver."""
        prompts = [
            (row, one.end, one.grouped, one.origin)
            for row, held in enumerate(self._prompts)
            for one in held
        ]
        return {**super().numbers(backend), "prompts": np.array(prompts, np.int64).reshape(-1, 4)}

    def restore(self, backend: BackendSession, numbers: Arrays, lengths: Ints) -> None:
        """See SessionObserver."""
        super().restore(backend, numbers, lengths)
        rows, prompts = len(lengths), numbers["prompts"].tolist()
        self._prompts = tuple(
            tuple(_Prompt(*one) for row, *one in prompts if row == i) for i in range(rows)
        )

    def _segments(self, backend: BackendSession) -> None:
        """Group the segments that are whole."""
        every = self.plan.every
        while (due := self._lengths - self._grouped >= every).any():
            self._group(backend, np.where(due, self._grouped + every, -1), self._origin)

    def _back(self, lengths: Ints) -> None:
        """Rows hold no more than `lengths` tokens; what was grouped with a token that is gone is in no unit."""
        grouped, origin, prompts = self._grouped.copy(), self._origin.copy(), list(self._prompts)
        for row, length in enumerate(lengths):
            while prompts[row] and prompts[row][-1].end > length:
                last = prompts[row][-1]
                prompts[row] = prompts[row][:-1]
                grouped[row], origin[row] = min(grouped[row], last.grouped), last.origin
            segments = max(0, int(length - origin[row])) // self.plan.every
            grouped[row] = min(grouped[row], origin[row] + segments * self.plan.every)
        self._lengths = np.minimum(self._lengths, lengths)
        self._marks = self._marks.rewound(lengths)
        self._grouped, self._origin, self._prompts = grouped, origin, tuple(prompts)

    def _group(self, backend: BackendSession, stop: Ints, origin: Ints) -> None:
        """Group the tokens of rows up to `stop` [B] (-1: none of the row)."""
        start = np.where(stop < 0, 0, self._grouped)
        first, end = (-(-(x - self.plan.sinks) // self.plan.size) for x in (start, stop))
        tokens, units = np.maximum(stop - start, 0), np.maximum(end - first, 0)
        inputs = {
            "start": start,
            "stop": stop,
            "first": np.maximum(first, 0),
            "units": units,
            "origin": origin,
            "ranks": np.arange(max(1, int(tokens.max()))),
            "numbers": np.arange(max(1, int(units.max()))),
        }
        if self.plan.marks:
            inputs["marks"] = self._together(start, tokens)
        backend.part(GROUP.name, inputs)
        self._grouped = np.maximum(self._grouped, stop)
        self._known = np.where(stop >= 0, origin, self._known)
        self._origin = origin

    def _together(self, start: Ints, tokens: Ints) -> Ints:
        """Which of the `tokens` [B] from `start` [B] on lie together: numbers from 0 on [B,N], in the order of their
        first tokens.
        """
        found = np.zeros((start.size, max(1, int(tokens.max()))), np.int64)
        for row, (first, count) in enumerate(zip(start, tokens, strict=True)):
            place = slice(first, first + count)
            own: Ints = np.arange(count) // self.plan.size
            if self.plan.ends:
                ends = self._ends[row, place].astype(np.int64)
                own = ends.cumsum() - ends
            told = np.full(count, -1)
            units = self._marks.units[row, place]
            told[: units.size] = units
            key = np.where(told >= 0, told, -1 - own)
            _, at, which = np.unique(key, return_index=True, return_inverse=True)
            found[row, :count] = at.argsort().argsort()[which]
        return found
