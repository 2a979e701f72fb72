"""ONNX Runtime on the CPU: one InferenceSession per graph of an artifact, shared by all sessions of a model."""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from accel.ir.entries import kind_of
from accel.ir.entries.encode import ENCODE
from accel.ir.entries.flat import FLAT
from accel.ir.entries.step import STEP
from accel.ir.state import StateValue
from accel.lowering.onnx.threads import default_threads
from accel.lowering.onnx.variants import PORTABLE
from accel.runtime.artifact.artifact import Artifact
from accel.runtime.backends.layer_inputs import everything
from accel.runtime.backends.onnx.machine import machine
from accel.runtime.backends.onnx.open import open_session
from accel.runtime.backends.onnx.session import Graphs, OrtSession
from accel.runtime.backends.onnx.tune import AUTO, choose
from accel.runtime.backends.onnx.waiting import Waiting, waiting
from accel.runtime.backends.tuning import Tuning


class OrtBackend:
    """The step entry of an artifact. Opened at first use; safe to share between threads."""

    def __init__(
        self,
        artifact: Artifact,
        *,
        threads: int | None = None,
        in_turns: bool = False,
        entry: str = STEP.name,
        kernels: str = AUTO,
        mapped: bool = False,
    ):
        """`threads`: compute threads of one call, by default `default_threads()`.
        `in_turns`: another backend computes between two calls of this one, whose threads make room for it at once.
        `kernels`: the variant of the step, or "auto": the fastest here.
        `mapped`: weights are not packed (`open_session`).
        Raises ArtifactError where there is none of that name.
        """
        self.artifact = artifact
        self.threads = threads or default_threads()
        self._in_turns = in_turns
        self._mapped = mapped
        self.entry = entry
        self._lock = threading.Lock()
        self._session: Any = None
        self._encoder: Any = None
        self._others: dict[str, Any] = {}
        self._spread: dict[int, Any] = {}
        self._waiting: Waiting | None = None
        auto = isinstance(kernels, str) and kernels == AUTO
        self._tuning = None if auto else choose(artifact, kernels, self.threads)

    @property
    def tuning(self) -> Tuning:
        """The variant of the step that is used, and why; measured when first asked for."""
        with self._lock:
            return self._tuned()

    @property
    def waiting(self) -> Waiting:
        """How its threads wait for each other; measured when first asked for. Raises InputError."""
        if self._waiting is None:
            self._waiting = waiting(self.threads)
        return self._waiting

    @property
    def state(self) -> tuple[StateValue, ...]:
        """The layout of the state."""
        return self.artifact.state

    @property
    def entries(self) -> Collection[str]:
        """The names of the graphs."""
        return self.artifact.entries

    @property
    def cost_key(self) -> dict[str, Any]:
        """What the costs of a call depend on: this machine, and the graph."""
        graph = self.artifact.entries[STEP.name].graphs[self.tuning.kernels]
        return {**machine(self.threads), "graph": self.artifact.files[graph].sha256}

    @property
    def session(self) -> Any:
        """The onnxruntime.InferenceSession, opened when first asked for. Raises ArtifactError."""
        with self._lock:
            if self._session is None:
                self._session = self._open(self.entry)
            return self._session

    @property
    def encoder(self) -> Any:
        """The InferenceSession of the encode entry, opened when first asked for; none: no encoder."""
        with self._lock:
            if self._encoder is None and ENCODE.name in self.artifact.entries:
                self._encoder = self._open(ENCODE.name)
            return self._encoder

    def other(self, entry: str) -> Any:
        """The InferenceSession of an entry beside the step, opened when first asked for."""
        with self._lock:
            if entry not in self._others:
                self._others[entry] = self._open(entry)
            return self._others[entry]

    def spread(self, threads: int) -> Any:
        """The InferenceSession of the step for calls of so many threads, opened when first asked for. Weights that are
        not `mapped` are packed once more for each.
        """
        if threads >= self.threads:
            return self.session
        with self._lock:
            if threads not in self._spread:
                self._spread[threads] = self._open(self.entry, threads)
            return self._spread[threads]

    def open_session(self, batch: int) -> OrtSession:
        """A backend session for `batch` rows with an empty cache."""
        facts, manifest = self.artifact.facts, self.artifact.manifest
        graphs = Graphs(
            self.session, self.artifact.state, facts.width, self.entries, self.other, self.spread, self.encoder,
            manifest.tile, everything(facts), manifest.keeps_trees(self.tuning.kernels),
        )  # fmt: skip
        return OrtSession(graphs, batch)

    def pool(self, shape: Sequence[int], dtype: str) -> Any:
        """See protocol.Backend."""
        return np.zeros(shape, dtype)

    def close(self) -> None:
        """Let go of the weights; they are freed when the last session over them closes."""
        with self._lock:
            self._session = self._encoder = None
            self._others, self._spread = {}, {}

    def _tuned(self) -> Tuning:
        if self._tuning is None:
            self._tuning = choose(self.artifact, AUTO, self.threads)
            assert self._tuning is not None  # it was measured
        return self._tuning

    def _open(self, entry: str, threads: int | None = None) -> Any:
        graphs = self.artifact.entries[entry].graphs
        path = self.artifact.path / graphs.get(self._tuned().kernels, graphs[PORTABLE])
        kind = kind_of(entry)
        most = self.threads if kind is None or kind.threads is None else kind.threads
        turns = self._in_turns or FLAT.name in self.entries  # which comes between two steps
        resting = turns or entry != self.entry
        most = min(most, threads or self.threads)
        spinning = self.waiting.spinning
        return open_session(path, most, spinning, resting, self._mapped)
