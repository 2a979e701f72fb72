"""What is known of a row's tokens: which are the prompt's, which unit they belong to, where its question begins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Self

import numpy as np

from accel.ir.errors import InputError
from accel.runtime.call import Arrays, Call
from accel.runtime.inputs.ints import Bools, Ints, as_ints
from accel.runtime.rows import ByRow, PerRow, Rows


@dataclass(frozen=True)
class Coming:
    """Marks of the next call's tokens: `units` [B,T], `question` [B] in them, and how many they are [B]."""

    units: Ints | None
    question: Ints
    counts: Ints | None


@dataclass(frozen=True)
class Marks(Rows):
    """prompt [B]: the length of a row at the end of its last prompt. running [B]: a prompt is not yet whole. units
    [B,N]: of each token, by position (-1: none). question [B]: the position where it begins (-1: nowhere).
    """

    prompt: PerRow
    running: Annotated[Bools, ByRow()]
    units: Annotated[Ints, ByRow(fill=-1)]
    question: PerRow
    next: Coming | None = None

    @classmethod
    def new(cls, batch: int) -> Marks:
        """Of rows without tokens."""
        none = np.full(batch, -1)
        return cls(np.zeros(batch, np.int64), none < 0, none[:, None][:, :0], none)

    def coming(self, units: Any, question: Any, lengths: Any) -> Marks:
        """The next call's tokens are marked. Raises InputError."""
        batch, counts, table = self.prompt.size, None, None
        if units is None and question is None:
            raise InputError("neither units nor question are given; give one of them")
        if units is not None:
            table = as_ints(units, "units")
            if table.ndim != 2 or table.shape[0] != batch or (table < -1).any():
                raise InputError(
                    f"units have shape {list(table.shape)}; give [{batch},T], numbers of units from 0 on, or -1"
                )
            counts = np.full(batch, table.shape[1])
        if lengths is not None:
            counts = as_ints(lengths, "lengths")
            most = table.shape[1] if table is not None else None
            if counts.shape != (batch,) or (counts < 0).any() or (counts > (most or 1 << 62)).any():
                raise InputError(
                    f"lengths of marks are {counts.tolist()}; give [{batch}], each 0..{most or 'T'}"
                )
        where = as_ints(-1 if question is None else question, "question")
        if where.ndim > 1 or where.size not in (1, batch) or (where < -1).any():
            raise InputError(
                f"question has shape {list(where.shape)}; give an int or [{batch}], the token where it begins, or -1"
            )
        begins = np.broadcast_to(where.reshape(-1), (batch,))
        return replace(self, next=Coming(table, begins, counts))

    def begun(self, call: Call) -> Marks:
        """A call comes. Raises InputError where others were marked."""
        before, after = call.before, call.after
        count = after - before
        running = self.running | (count > (0 if call.prompt else 1))
        state = replace(self, running=running)
        if self.next is None:
            return state
        marks, question = self.next, self.next.question
        if marks.counts is not None and (wrong := marks.counts != count).any():
            row = int(wrong.argmax())
            raise InputError(
                f"{marks.counts[row]} tokens of row {row} are marked, but the call has {count[row]}; mark as many"
            )
        if (wrong := (question >= count) & (question > -1)).any():
            row = int(wrong.argmax())
            raise InputError(
                f"the question of row {row} begins at token {question[row]}, but the call has {count[row]}; give a "
                f"token of the call, or -1"
            )
        units = self.units
        if marks.units is not None:
            units = _padded(units, int(after.max()))
            column = np.arange(marks.units.shape[1])
            real = np.nonzero(column < count[:, None])
            units[real[0], (before[:, None] + column)[real]] = marks.units[real]
        begins = np.where(question >= 0, before + question, self.question)
        return replace(state, units=units, question=begins, next=None)

    def ended(self, lengths: Ints) -> Marks:
        """The prompts of the rows that had some are whole."""
        prompt = np.where(self.running, lengths, self.prompt)
        question = np.where(self.running, -1, self.question)
        return replace(self, prompt=prompt, running=lengths == 0, question=question)

    def prompts(self, lengths: Ints) -> Ints:
        """How many of the tokens of each row are the prompt's [B]."""
        found: Ints = np.where(self.running, lengths, np.minimum(self.prompt, lengths))
        return found

    def inputs(self, names: Sequence[str], lengths: Ints) -> Arrays:
        """Inputs of `compress`, of these names."""
        every = {
            "prompt": self.prompts(lengths),
            "units": _padded(self.units, max(1, int(lengths.max()))),
            "question": self.question.copy(),
        }
        return {name: every[name] for name in names}

    def numbers(self) -> Arrays:
        """See Rows. With what comes next."""
        found = super().numbers()
        if self.next is not None:
            told = {"units": self.next.units, "counts": self.next.counts}
            found["next.question"] = self.next.question
            found |= {f"next.{name}": array for name, array in told.items() if array is not None}
        return found

    def restored(self, numbers: Arrays) -> Self:
        """See Rows."""
        question, following = numbers.get("next.question"), None
        if question is not None:
            following = Coming(numbers.get("next.units"), question, numbers.get("next.counts"))
        return replace(super().restored(numbers), next=following)

    def select(self, rows: Ints) -> Self:
        """See Rows. Nothing is told of what comes next."""
        return replace(super().select(rows), next=None)

    def join(self, other: Self) -> Self:
        """See Rows. Nothing is told of what comes next."""
        return replace(super().join(other), next=None)

    def rewound(self, lengths: Ints) -> Marks:
        """Without marks of tokens from `lengths` [B] on."""
        gone = np.arange(self.units.shape[1]) >= lengths[:, None]
        question = np.where(self.question >= lengths, -1, self.question)
        prompt = np.minimum(self.prompt, lengths)
        units = np.where(gone, -1, self.units)
        return Marks(prompt, self.running | (lengths == 0), units, question, self.next)

    def moved(self, before: Ints, after: Ints) -> Marks:
        """Of rows of `before` [B] tokens so many stayed, at positions from 0 on: only of a question is known where it
        is, since its tokens so far are the newest, and stay.
        """
        same = before == after
        shifted = np.maximum(self.question - before + after, 0)
        question = np.where(self.question >= 0, shifted, -1)
        units = np.where(same[:, None], self.units, -1)
        prompt = np.minimum(self.prompt, after)
        return replace(
            self, prompt=prompt, units=units, question=np.where(same, self.question, question)
        )

    def forget(self, rows: Bools) -> Marks:
        """These rows start anew."""
        return self.rewound(np.where(rows, 0, 1 << 60))


def _padded(units: Ints, width: int) -> Ints:
    """A copy of this width at least."""
    found = np.full((units.shape[0], max(width, units.shape[1])), -1)
    found[:, : units.shape[1]] = units
    return found
