"""An engine: one thread that serves the requests of many over one loaded model."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Mapping
from contextlib import closing
from dataclasses import dataclass
from threading import Condition, Thread
from typing import Any, cast

from accel.ir.errors import InputError
from accel.runtime.inputs.prompts import as_count
from accel.runtime.model.compiled import CompiledModel
from accel.runtime.model.output import Prepared
from accel.runtime.serve.request import CANCELLED, Event, Full, Request, Ticket, Usage

__all__ = ["Engine", "Event", "Full", "Request", "Ticket", "Usage"]


@dataclass(eq=False)
class _Job:
    """A request on its way; `told`: how many of its tokens the ticket has."""

    prepared: Prepared
    ticket: Ticket
    told: int = 0

    def tell(self) -> int:
        """Give the ticket what the row took since; how many tokens."""
        sample = self.prepared.sample
        row, script, before = sample.row, sample.script, self.told
        finish = sample.finish_reason
        for at in range(before, len(row.tokens)):
            last = finish is not None and at == len(row.tokens) - 1
            if last:
                self.ticket.stop_reason = sample.stop_reason
            self.ticket.put(
                Event(
                    row.tokens[at],
                    script.take(1) + (script.finish() if last else ""),
                    row.logprobs[at] if row.scored else None,
                    finish if last else None,
                )
            )
        self.told = len(row.tokens)
        return self.told - before

    def end(self) -> None:
        """Tell that it was cancelled."""
        self.ticket.put(Event(-1, self.prepared.sample.script.finish(), None, CANCELLED))


class Engine:
    """Serves requests of any threads over one model, whose sessions its own thread runs. Each request gets the tokens
    that `generate` gives it alone.
    """

    def __init__(
        self, model: CompiledModel, *, max_batch: int | None = None, max_waiting: int = 64
    ):
        """`max_batch`: most requests that run at once (default: the model's). `max_waiting`: most that wait."""
        most = model.facts.max_batch
        self._most = most if max_batch is None else as_count(max_batch, "max_batch", 1, most)
        self._max_waiting = as_count(max_waiting, "max_waiting", 1)
        self._model = model
        self._loop, self._context = model.decoding()
        self._changed = Condition()
        self._waiting = deque[_Job]()
        self._running: list[_Job] = []
        self._closing = self._halted = False
        self._counts = dict.fromkeys(
            (
                "requests_total", "prompt_tokens_total", "generated_tokens_total", "preemptions_total",
                "drafted_total", "accepted_total", "kv_bytes",
            ),
            0.0,
        )  # fmt: skip
        self._thread = Thread(target=self._work, name="accel-engine", daemon=True)
        self._thread.start()

    @property
    def how(self) -> str:
        """How requests share the model, in a sentence."""
        return "requests run one after the other"

    def submit(self, request: Request) -> Ticket:
        """Take a request. Raises Full where as many wait as may, and InputError where it can never be served."""
        prepared = self._model.prepare(
            request.prompt,
            request.params,
            encoder_input=request.encoder_input,
            adapter=request.adapter,
            sample=request.sample,
        )
        row = prepared.sample.row
        if row.finish:
            raise InputError(
                f"the prompt has {row.prompt.size} tokens, which leaves no room for one more in max_context = "
                f"{self._model.facts.max_context}; shorten it, or build with a larger max_context"
            )
        with self._changed:
            if self._closing:
                raise InputError("this engine is closed; make another")
            if len(self._waiting) >= self._max_waiting:
                raise Full(f"{self._max_waiting} requests wait already; try again later")
            job = _Job(prepared, Ticket(row.prompt.size, self._wake))
            self._waiting.append(job)
            self._counts["requests_total"] += 1
            self._changed.notify_all()
        return job.ticket

    @property
    def stats(self) -> Mapping[str, float]:
        """`running` and `waiting` requests; since the start `requests_total`, `prompt_tokens_total`,
        `generated_tokens_total`, `preemptions_total`, and `drafted_total` and `accepted_total` tokens of requests that
        ended; `kv_bytes` of state now.
        """
        with self._changed:
            return {
                "running": len(self._running),
                "waiting": len(self._waiting),
                **self._counts,
            }

    def close(self, *, drain: bool = True, timeout: float | None = None) -> None:
        """Take no more requests, let those taken end (`drain`; those that run after `timeout` seconds are cancelled),
        or cancel all of them, and end the thread. Closing again has no effect. The model stays open.
        """
        with self._changed:
            self._closing = True
            self._halted |= not drain
            self._changed.notify_all()
        self._thread.join(timeout)
        if self._thread.is_alive():
            with self._changed:
                self._halted = True
                self._changed.notify_all()
            self._thread.join()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._waiting and not self._closing:
                    self._changed.wait()
                if not self._waiting:
                    return
                job = self._waiting.popleft()
                self._running = [job]
            try:
                self._alone(job)
            except Exception as error:  # the request's alone: others go on
                job.ticket.put(error)
            with self._changed:
                drafting = job.prepared.sample.row.drafting
                self._counts["drafted_total"] += drafting["drafted"]
                self._counts["accepted_total"] += drafting["accepted"]
                self._counts["kv_bytes"] = 0
                self._running = []

    def _alone(self, job: _Job) -> None:
        """Serve one request from its prompt to its end."""
        row = job.prepared.sample.row
        if self._gone(job):
            return job.end()
        with job.prepared.open() as session:
            self._count("prompt_tokens_total", row.prompt.size)
            tokens = self._loop.tokens(session, [row], self._context)
            with closing(cast(Generator[Any], tokens)):
                for _ in tokens:
                    self._count("generated_tokens_total", job.tell())
                    self._counts["kv_bytes"] = session.stats["kv_bytes"]
                    if not row.finish and self._gone(job):
                        return job.end()

    def _gone(self, job: _Job) -> bool:
        return job.ticket.cancelled or self._halted

    def _count(self, name: str, more: float) -> None:
        with self._changed:
            self._counts[name] += more
