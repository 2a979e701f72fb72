"""How precisely a call reads the cache: in all bits that are stored, or coarsely."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from accel.ir.kv import COARSE
from accel.runtime.backends.layer_inputs import reading
from accel.runtime.backends.protocol import BackendSession
from accel.runtime.call import Call
from accel.runtime.inputs.ints import Ints
from accel.runtime.session.observers.observer import (
    CallWatcher,
    ModelParts,
    ObserverFactory,
    SessionObserver,
    Settled,
)


class Precision(SessionObserver, CallWatcher):
    """Lets the backend session know how calls read."""

    controls: ClassVar[Mapping[str, str]] = {
        COARSE: "coarse: this model reads its cache in one way; build it with a kv.codec that has two, such as "
        "quantspec-kv"
    }

    def __init__(self) -> None:
        self._coarse = False  # what the backend session knows

    @classmethod
    def for_model(cls, model: ModelParts) -> ObserverFactory | None:
        """Where the codec can be read in two ways."""
        kv = model.facts.kv
        return ObserverFactory(lambda n: cls()) if kv is not None and kv.coarse else None

    def begin(self, backend: BackendSession, call: Call) -> None:
        """See SessionObserver."""
        self._read(backend, bool(call.controls.get(COARSE, False)))

    def settle(self, backend: BackendSession, moment: str, lengths: Ints) -> Settled | None:
        """See SessionObserver. What is no part of a call reads all bits."""
        if moment == "call":
            self._read(backend, False)
        return None

    def undo(self, backend: BackendSession, lengths: Ints) -> bool:
        """See SessionObserver."""
        self._read(backend, False)
        return False

    def _read(self, backend: BackendSession, coarse: bool) -> None:
        if coarse is not self._coarse:
            backend.control(reading(coarse))
            self._coarse = coarse
