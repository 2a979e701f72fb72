"""What a session knows of the encoder's input: nothing runs before it was given, and who drafts reads it, too."""

from __future__ import annotations

import time
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt

from accel.ir.encoder import EncoderFacts
from accel.ir.errors import InputError
from accel.runtime.backends.protocol import BackendSession
from accel.runtime.call import Call
from accel.runtime.inputs.encoder_inputs import entry_inputs
from accel.runtime.rows import ByRow, PerRow, PerSession
from accel.runtime.session.observers.observer import (
    Calls,
    CallWatcher,
    Capabilities,
    ModelParts,
    ObserverFactory,
    SessionObserver,
)


class EncoderInput(SessionObserver, CallWatcher):
    """Whether the encoder was given its input, what that is ([B,X] token ids, or features), and how long each row's is;
    the cross state is the backend's.
    """

    encoded: Annotated[bool, PerSession()]
    lengths: PerRow
    source: Annotated[npt.NDArray[Any], ByRow()]

    order = 0  # it refuses before others prepare a call
    capabilities = Capabilities(
        joins=False
    )  # encoder inputs differ in length from session to session

    def __init__(self, encoder: EncoderFacts, batch: int):
        self.encoder = encoder
        self.encoded = False
        self.lengths = np.zeros(batch, np.int64)
        self.source = np.zeros((batch, 0), np.int64)

    @classmethod
    def for_model(cls, model: ModelParts) -> ObserverFactory | None:
        """Of encoder-decoders."""
        encoder = model.facts.encoder
        return None if encoder is None else ObserverFactory(lambda batch: cls(encoder, batch))

    def encode(self, calls: Calls, inputs: Any, lengths: Any) -> None:
        """See `Session.encode`."""
        arrays = entry_inputs(inputs, lengths, calls.batch, self.encoder)
        start = time.perf_counter()
        calls.backend.encode(arrays)
        calls.count(1, 0, start)
        self.encoded, self.source = True, arrays["features" if self.encoder.features else "inputs"]
        whole = np.full(calls.batch, self.encoder.max_length)
        self.lengths = (arrays["inputs.pos"] >= 0).sum(1) if "inputs.pos" in arrays else whole

    def begin(self, backend: BackendSession, call: Call) -> None:
        """See SessionObserver."""
        if not self.encoded:
            raise InputError("this model has an encoder: call session.encode(inputs) before run")
