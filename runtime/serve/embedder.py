"""In place of an engine, over a model whose texts become vectors: requests take turns."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from threading import Condition
from typing import Any

from accel.ir.errors import AccelError, InputError
from accel.runtime.inputs.ints import Ints
from accel.runtime.inputs.prompts import as_count
from accel.runtime.model.compiled import CompiledModel
from accel.runtime.model.embed import Vectors
from accel.runtime.serve.request import Full, Request, Ticket

NO_TEXT = "this model gives vectors, and no text; ask /v1/embeddings (a cross-encoder: /v1/rerank), or another model"


class Late(AccelError):
    """A request took longer than it may."""


class Embedder:
    """One batch runs at a time, of the request that came first."""

    def __init__(
        self, model: CompiledModel, *, max_batch: int | None = None, max_waiting: int = 64
    ):
        """As of `Engine`."""
        facts = model.facts
        given = facts.max_batch if max_batch is None else max_batch
        self.max_batch = as_count(given, "max_batch", 1, facts.max_batch)
        self.max_waiting = as_count(max_waiting, "max_waiting", 1)
        self._model, self._changed = model, Condition()
        self._waiting, self._running, self._closing = 0, False, False
        self._counts = {"requests_total": 0, "prompt_tokens_total": 0}

    @property
    def how(self) -> str:
        """How requests share the model, in a sentence."""
        return f"requests take turns; texts of one share calls of up to {self.max_batch}"

    @property
    def stats(self) -> Mapping[str, float]:
        """`running` and `waiting` requests, and since the start `requests_total` and `prompt_tokens_total`."""
        with self._changed:
            return {"running": int(self._running), "waiting": self._waiting, **self._counts}

    def embed(
        self, texts: Sequence[Ints], dimensions: int | None = None, seconds: float | None = None
    ) -> Vectors:
        """The vectors [n,E] of texts as token ids; `seconds`: the longest that it may take. Raises Full, Late,
        InputError.
        """
        end = None if seconds is None else time.monotonic() + seconds

        def check() -> None:
            if self._closing:
                raise InputError("this engine is closed; make another")
            if end is not None and time.monotonic() > end:
                raise Late(f"the request took longer than {seconds:g} s")

        with self._changed:
            if self._waiting >= self.max_waiting:
                raise Full(f"{self.max_waiting} requests wait already; try again later")
            self._waiting += 1
            try:
                while self._running:
                    check()
                    self._changed.wait(None if end is None else max(0.0, end - time.monotonic()))
                check()
                self._running = True
            finally:
                self._waiting -= 1
        try:
            found = self._model.embed(texts, dimensions=dimensions, before=check)
        finally:
            with self._changed:
                self._running = False
                self._counts["requests_total"] += 1
                self._counts["prompt_tokens_total"] += sum(one.size for one in texts)
                self._changed.notify_all()
        return found

    def submit(self, request: Request, **_: Any) -> Ticket:
        """Raises InputError."""
        raise InputError(NO_TEXT)

    def close(self, *, drain: bool = True, timeout: float | None = None) -> None:
        """As of `Engine`: takes no more, and waits for what runs."""
        with self._changed:
            if drain:
                self._changed.wait_for(lambda: not (self._running or self._waiting), timeout)
            self._closing = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._running)

    def __enter__(self) -> Embedder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
