"""Tokens that a session runs behind a prompt, or a part of one, for their attention alone."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Self

import numpy as np
import numpy.typing as npt

from accel.ir.errors import InputError
from accel.runtime.backends.protocol import BackendSession
from accel.runtime.call import Arrays
from accel.runtime.inputs.ints import Ints
from accel.runtime.rows import ByRow, PerRow, Rows
from accel.runtime.session.observers.observer import Calls, CallWatcher

_ROOM = 16  # positions that a repeat needs at least: fewer would take too many calls


@dataclass(frozen=True)
class PromptLog(Rows):
    """The tokens of a prompt, `tokens` [B,N] at `positions` [B,N] (-1: none)."""

    tokens: PerRow
    positions: Annotated[Ints, ByRow(fill=-1)]

    @classmethod
    def new(cls, batch: int) -> PromptLog:
        """Of rows without a prompt."""
        return cls(np.zeros((batch, 0), np.int64), np.zeros((batch, 0), np.int64))

    def restored(self, numbers: Arrays) -> Self:
        """See Rows. A file leaves out a log of nothing."""
        return super().restored(numbers) if numbers else self

    def numbers(self) -> Arrays:
        """See Rows."""
        return super().numbers() if self.tokens.size else {}

    def add(self, tokens: Ints, positions: Ints) -> PromptLog:
        """With those of a call."""
        return PromptLog(
            np.concatenate([self.tokens, tokens], axis=1),
            np.concatenate([self.positions, positions], axis=1),
        )

    def rewound(self, lengths: Ints) -> PromptLog:
        """Without tokens from `lengths` [B] on."""
        return PromptLog(
            self.tokens, np.where(self.positions >= lengths[:, None], -1, self.positions)
        )

    def forget(self, rows: npt.NDArray[np.bool_]) -> PromptLog:
        """Without the tokens of these rows."""
        return PromptLog(self.tokens, np.where(rows[:, None], -1, self.positions))

    def ragged(self) -> tuple[Ints, Ints]:
        """The tokens, each row's in the order of their positions [B,M], and how many they are [B]."""
        there = self.positions >= 0
        counts = there.sum(1)
        order = np.argsort(np.where(there, self.positions, 1 << 60), axis=1, kind="stable")
        tokens = np.take_along_axis(self.tokens, order, axis=1)[:, : int(counts.max(initial=0))]
        return tokens, counts


@dataclass(frozen=True)
class Question:
    """The question of a call: of its `tokens` [B,T] those from column `begins` [B] on (-1: none), up to `counts` [B].
    end [B]: what rows hold after the call.
    """

    tokens: Ints
    begins: Ints
    counts: Ints
    end: Ints

    def moved(self, by: Ints) -> Self:
        """Rows hold so many more tokens [B] than before."""
        return replace(self, end=self.end + by)

    def to_come(self, lengths: Ints) -> tuple[Ints, Ints]:
        """What of it rows of `lengths` [B] tokens lack [B,N], and how many tokens that is [B]."""
        asked = np.where(self.begins < 0, 0, self.counts - self.begins)
        counts = np.minimum(asked, self.end - lengths)
        columns = (self.counts - counts)[:, None] + np.arange(int(counts.max(initial=0)))
        columns = np.minimum(columns, self.tokens.shape[1] - 1)
        return np.take_along_axis(self.tokens, columns, axis=1), counts


class Listener(CallWatcher):
    """Extra outputs `names` [B,T,…] of what runs aside, by name at `positions` [B,T], call after call."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self.heard: list[tuple[Arrays, Ints]] = []

    def before(self, backend: BackendSession, width: int) -> Collection[str]:
        """See SessionObserver."""
        return self._names

    def after(self, tokens: Ints, positions: Ints, extra: Arrays) -> None:
        """See SessionObserver."""
        self.heard.append((extra, positions))


def last_tokens(before: Ints, tokens: Ints, positions: Ints) -> Ints:
    """The token of the last real column of each row [B], or what it was."""
    real = positions >= 0
    column = real.shape[1] - 1 - real[:, ::-1].argmax(1)
    newest = np.take_along_axis(tokens, column[:, None], axis=1)[:, 0]
    return np.where(real.any(1), newest, before)


def blank(calls: Calls, names: Sequence[str]) -> None:
    """Let state be 0, in new buffers."""
    buffers = calls.backend.buffers()
    calls.put({name: np.zeros_like(buffers[name]) for name in names if name in buffers})


def repeat(calls: Calls, prompt: PromptLog) -> None:
    """Run a prompt again behind itself, part by part; rows do not hold it. Raises InputError where positions do not
    suffice.
    """
    tokens, counts = prompt.ragged()
    room = calls.max_context - int(calls.lengths.max(initial=0))
    longest = int(counts.max(initial=0))
    if room < min(_ROOM, longest):
        raise InputError(
            f"the recipe repeats a prompt before it compresses it, which needs {_ROOM} free positions, but the prompt "
            f"leaves {room} of {calls.max_context}; give at most {calls.max_context - _ROOM} tokens"
        )
    width = min(calls.chunk, room)
    for start in range(0, longest, width):
        part = tokens[:, start : start + width]
        calls.aside(part, np.clip(counts - start, 0, part.shape[1]), calls.lengths)
