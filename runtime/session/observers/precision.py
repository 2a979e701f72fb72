"""How precisely a call reads the cache: in all bits that are stored, or coarsely."""

from __future__ import annotations

from accel.runtime.backends.layer_inputs import reading
from accel.runtime.backends.protocol import Arrays, BackendSession
from accel.runtime.session.observers.observer import ModelParts, ObserverFactory, SessionObserver


class Precision(SessionObserver):
    """Lets the backend session know how calls read."""

    @classmethod
    def for_model(cls, model: ModelParts) -> ObserverFactory | None:
        """Where the codec can be read in two ways."""
        kv = model.facts.kv
        return ObserverFactory(lambda n: cls()) if kv is not None and kv.coarse else None

    def reads(self, backend: BackendSession, coarse: bool) -> bool:
        """See SessionObserver."""
        backend.control(reading(coarse))
        return True

    def numbers(self, backend: BackendSession) -> Arrays:
        """See SessionObserver. Between calls it knows nothing."""
        return {}
