"""How far a session rewinds where what a token attends to depends on what the token before it chose."""

from __future__ import annotations

from typing import Self

import numpy as np

from accel.ir.errors import InputError
from accel.ir.sizes import FEW
from accel.ir.state import Part
from accel.runtime.backends.protocol import Arrays, BackendSession
from accel.runtime.inputs.ints import Ints
from accel.runtime.inputs.stack import stacked
from accel.runtime.session.observers.observer import (
    Capabilities,
    ModelParts,
    ObserverFactory,
    SessionObserver,
)


class ChoiceMemory(SessionObserver):
    """Where rows can go back to: the state has the choices of the last FEW tokens. A call of more tokens chooses
    nothing, so that a row can always go back into one, or behind it; unless choices go by a `history` of more tokens
    than the one before, which wide calls leave, too.
    """

    capabilities = Capabilities(back=FEW, width=FEW, trees=False, chunks=False)

    def __init__(self, history: bool, batch: int):
        self._history = history
        self._wide: Ints = np.zeros((batch, 0), np.bool_)  # tokens that chose nothing

    @classmethod
    def for_model(cls, model: ModelParts) -> ObserverFactory | None:
        """Where the state has choices."""
        there = any(value.part is Part.CHOICE for value in model.state)
        found = model.facts.selection
        history = found is not None and found.history
        return ObserverFactory(lambda n: cls(history, n)) if there else None

    def after(self, tokens: Ints, positions: Ints, queries: Arrays) -> None:
        """See SessionObserver."""
        end = int(positions.max()) + 1
        wide = np.pad(self._wide, ((0, 0), (0, max(0, end - self._wide.shape[1]))))
        rows, columns = np.nonzero(positions >= 0)
        wide[rows, positions[rows, columns]] = positions.shape[1] > FEW and not self._history
        self._wide = wide

    def check(self, wanted: Ints, lengths: Ints) -> None:
        """See SessionObserver."""
        for row, (back, length) in enumerate(zip(wanted, lengths, strict=True)):
            if 0 < back < length - FEW and not self._wide[row, back - 1]:
                raise InputError(
                    f"cannot rewind row {row} to {back}: its tokens go on from choices of earlier ones, of which the "
                    f"last {FEW} are known; give {length - FEW}..{length}, "
                    + ("or 0" if self._history else "the end of a prompt, or 0")
                )

    def select(self, rows: Ints) -> None:
        """See SessionObserver."""
        self._wide = self._wide[rows]

    def join(self, backend: BackendSession, other: Self) -> None:
        """See SessionObserver."""
        self._wide = stacked(self._wide, other._wide)

    def copy(self) -> Self:
        """Of its own: what it holds is replaced, never written."""
        other = type(self)(self._history, len(self._wide))
        other._wide = self._wide
        return other

    def numbers(self, backend: BackendSession) -> Arrays:
        """See SessionObserver."""
        return {"wide": self._wide}

    def restore(self, backend: BackendSession, numbers: Arrays, lengths: Ints) -> None:
        """See SessionObserver."""
        self._wide = numbers["wide"]
