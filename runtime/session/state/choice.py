"""How far a session rewinds where what a token attends to depends on what the token before it chose."""

from __future__ import annotations

import numpy as np

from accel.ir.errors import InputError
from accel.ir.sizes import FEW
from accel.ir.state import Part
from accel.runtime.call import Arrays
from accel.runtime.inputs.ints import Ints
from accel.runtime.rows import PerRow
from accel.runtime.session.observers.observer import (
    CallWatcher,
    Capabilities,
    ModelParts,
    ObserverFactory,
    SessionObserver,
)


class ChoiceMemory(SessionObserver, CallWatcher):
    """Where rows can go back to: the state has the choices of the last FEW tokens. A call of more tokens chooses
    nothing, so that a row can always go back into one, or behind it; unless choices go by a `history` of more tokens
    than the one before, which wide calls leave, too.
    """

    _wide: PerRow  # [B,N], which tokens chose nothing

    capabilities = Capabilities(back=FEW, width=FEW, trees=False, chunks=False)

    def __init__(self, history: bool, batch: int):
        self._history = history
        self._wide = np.zeros((batch, 0), np.bool_)

    @classmethod
    def for_model(cls, model: ModelParts) -> ObserverFactory | None:
        """Where the state has choices."""
        there = any(value.part is Part.CHOICE for value in model.state)
        found = model.facts.selection
        history = found is not None and found.history
        return ObserverFactory(lambda n: cls(history, n)) if there else None

    def after(self, tokens: Ints, positions: Ints, extra: Arrays) -> None:
        """See SessionObserver."""
        end = int(positions.max()) + 1
        wide = np.pad(self._wide, ((0, 0), (0, max(0, end - self._wide.shape[1]))))
        rows, columns = np.nonzero(positions >= 0)
        wide[rows, positions[rows, columns]] = positions.shape[1] > FEW and not self._history
        self._wide = wide

    def check(self, new_lengths: Ints, lengths: Ints) -> None:
        """See SessionObserver."""
        for row, (back, length) in enumerate(zip(new_lengths, lengths, strict=True)):
            if 0 < back < length - FEW and not self._wide[row, back - 1]:
                raise InputError(
                    f"cannot rewind row {row} to {back}: its tokens go on from choices of earlier ones, of which the "
                    f"last {FEW} are known; give {length - FEW}..{length}, "
                    + ("or 0" if self._history else "the end of a prompt, or 0")
                )
