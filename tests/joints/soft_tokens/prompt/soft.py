"""Runs a call in which embeddings stand for some tokens."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from accel.runtime.backends.protocol import BackendSession
from accel.runtime.call import Call, Logits
from accel.runtime.inputs.ints import Ints
from accel.runtime.session.observers.observer import (
    Calls,
    CallWatcher,
    ModelParts,
    ObserverFactory,
    PromptRunner,
    SessionObserver,
)


class SoftTokens(SessionObserver, CallWatcher, PromptRunner):
    """The control `embeddings` [B,T,E]: NaN where a token is meant."""

    controls: ClassVar[Mapping[str, str]] = {"embeddings": "build with prefill.prune = soft-tokens"}

    @classmethod
    def for_model(cls, model: ModelParts) -> ObserverFactory | None:
        return ObserverFactory(lambda batch: cls()) if "soft.step" in model.entries else None

    def begin(self, backend: BackendSession, call: Call) -> None:
        self._given = call.controls.get("embeddings")

    def run(
        self, calls: Calls, tokens: Ints, counts: Ints | None, last_only: bool, prompt: bool
    ) -> Logits | None:
        if self._given is None:
            return None
        start, (batch, width) = time.perf_counter(), tokens.shape
        full = np.full(batch, width) if counts is None else counts
        columns = np.arange(width)
        positions = np.where(columns < full[:, None], calls.lengths[:, None] + columns, -1)
        slots = calls.lengths - calls.base
        calls.need([int(slots.max()) + width])
        rows = np.maximum(full - 1, 0)[:, None] if last_only else np.tile(columns, (batch, 1))
        given = {"positions": positions, "slots": slots, "rows": rows}
        stream = calls.backend.part("soft.embed", {**given, "tokens": tokens})["stream"]
        stream = np.where(np.isnan(self._given), stream, self._given).astype(np.float32)
        logits: Logits = calls.backend.part("soft.step", {**given, "stream": stream})["logits"]
        calls.heard(tokens, positions)
        calls.count(2, int(full.sum()), start)
        return logits
