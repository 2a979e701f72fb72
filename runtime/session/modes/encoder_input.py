"""What a session knows of the encoder's input: nothing runs before it was given."""

from __future__ import annotations

import time
from typing import Annotated, Any

from accel.ir.encoder import EncoderFacts
from accel.ir.errors import InputError
from accel.runtime.backends.protocol import BackendSession
from accel.runtime.call import Call
from accel.runtime.inputs.encoder_inputs import entry_inputs
from accel.runtime.rows import PerSession
from accel.runtime.session.observers.observer import (
    Calls,
    CallWatcher,
    Capabilities,
    ModelParts,
    ObserverFactory,
    SessionObserver,
)


class EncoderInput(SessionObserver, CallWatcher):
    """Whether the encoder was given its input; the cross state is the backend's."""

    encoded: Annotated[bool, PerSession()]

    order = 0  # it refuses before others prepare a call
    capabilities = Capabilities(
        joins=False
    )  # encoder inputs differ in length from session to session

    def __init__(self, encoder: EncoderFacts):
        self.encoder = encoder
        self.encoded = False

    @classmethod
    def for_model(cls, model: ModelParts) -> ObserverFactory | None:
        """Of encoder-decoders."""
        encoder = model.facts.encoder
        return None if encoder is None else ObserverFactory(lambda batch: cls(encoder))

    def encode(self, calls: Calls, inputs: Any, lengths: Any) -> None:
        """See `Session.encode`."""
        arrays = entry_inputs(inputs, lengths, calls.batch, self.encoder)
        start = time.perf_counter()
        calls.backend.encode(arrays)
        calls.count(1, 0, start)
        self.encoded = True

    def begin(self, backend: BackendSession, call: Call) -> None:
        """See SessionObserver."""
        if not self.encoded:
            raise InputError("this model has an encoder: call session.encode(inputs) before run")
