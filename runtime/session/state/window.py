"""What a session knows of layers that keep the newest tokens only, since they see a window of them."""

from __future__ import annotations

from typing import Annotated

import numpy as np

from accel.ir.errors import InputError
from accel.ir.window import Window
from accel.runtime.backends.protocol import BackendSession
from accel.runtime.call import Call
from accel.runtime.inputs.ints import Ints
from accel.runtime.rows import ByRow, PerRow
from accel.runtime.session.observers.observer import (
    CallWatcher,
    Capabilities,
    ModelParts,
    ObserverFactory,
    SessionObserver,
)


class WindowState(SessionObserver, CallWatcher):
    """`first` [B]: the position of slot 0 of these layers; they hold no token before it."""

    first: PerRow
    _lengths: Annotated[Ints, ByRow(saved=False)]  # as a call began

    order = 30
    moves_slots = True

    def __init__(self, plan: Window, batch: int):
        self.plan = plan
        self.first = self._lengths = np.zeros(batch, np.int64)

    @classmethod
    def for_model(cls, model: ModelParts) -> ObserverFactory | None:
        """Where layers keep a window."""
        plan = model.facts.window
        return None if plan is None else ObserverFactory(lambda batch: cls(plan, batch))

    @property
    def capabilities(self) -> Capabilities:
        """A call of any width is the same as single ones; see `Window`."""
        return Capabilities(back=self.plan.back)

    @property
    def held_from(self) -> Ints:
        """See SessionObserver."""
        return np.where(self.first > 0, self.first + self.plan.size - 1, 0)

    def begin(self, backend: BackendSession, call: Call) -> None:
        """See SessionObserver."""
        self._lengths = call.before

    def make_room(self, backend: BackendSession, slots: Ints, width: int) -> None:
        """See SessionObserver."""
        held = slots - self.first
        stay = self.plan.stay(held, width)
        if (gone := held - stay).any():
            backend.drop(gone)
            self.first = self.first + gone

    def slots(self, ends: Ints) -> list[int]:
        """See SessionObserver."""
        return [int((ends - self.first).max())]

    def lost(self) -> bool:
        """Whether rows cannot go back to where the call began."""
        begun = self._lengths
        return bool(((begun < self.held_from) & (begun > 0)).any())

    def undo(self, backend: BackendSession, lengths: Ints) -> bool:
        """See SessionObserver. Rows that were empty are so again."""
        self._forget(backend, lengths)
        return False

    def check(self, new_lengths: Ints, lengths: Ints) -> None:
        """Raises InputError where a token to come would see tokens that were dropped."""
        low = self.held_from
        if (bad := (new_lengths < low) & (new_lengths > 0)).any():
            row = int(bad.argmax())
            raise InputError(
                f"cannot rewind row {row} to {new_lengths[row]}: layers with a window of {self.plan.size} keep the "
                f"newest tokens only; give {low[row]}..{lengths[row]}, or 0, or build with window = all, or a larger "
                f"window.newest back than {self.plan.back}"
            )

    def rewind(self, backend: BackendSession, new_lengths: Ints, lengths: Ints) -> bool:
        """See SessionObserver."""
        self._forget(backend, new_lengths)
        return False

    def _forget(self, backend: BackendSession, lengths: Ints) -> None:
        """Rows of 0 tokens start anew."""
        if (anew := (lengths == 0) & (self.first > 0)).any():
            backend.forget(anew)
            self.first = np.where(anew, 0, self.first)
