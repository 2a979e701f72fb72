"""An engine: one thread that serves the requests of many over one loaded model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from threading import Thread
from time import monotonic

import numpy as np

from accel.ir.errors import InputError, SavedSessionError
from accel.runtime.decode.context import DecodeContext
from accel.runtime.decode.row import Row
from accel.runtime.inputs.prompts import as_count
from accel.runtime.loop import Base as Loop
from accel.runtime.loop import in_rounds
from accel.runtime.model.compiled import CompiledModel
from accel.runtime.sample.standard import Standard
from accel.runtime.schedule import Limits, chosen
from accel.runtime.schedule.continuous_batching import ContinuousBatching
from accel.runtime.serve.batcher import Batcher
from accel.runtime.serve.job import Job
from accel.runtime.serve.queue import Queue
from accel.runtime.serve.request import Event, Full, Handed, Request, Ticket, Usage

__all__ = ["Engine", "Event", "Full", "Handed", "Request", "Ticket", "Usage"]

BLOCK = 16  # tokens


class Engine:
    """Serves requests of any threads over one model, whose sessions its own thread runs (`Batcher`). Each request gets
    the tokens that `generate` gives it alone. `how` says where requests cannot share a session.
    """

    def __init__(
        self,
        model: CompiledModel,
        *,
        max_batch: int | None = None,
        max_waiting: int = 64,
        blocks: int | None = None,
    ):
        """`max_batch`: most requests that run at once (default: the model's). `max_waiting`: most that wait. `blocks`:
        of 16 tokens, those that all requests together may hold (default: enough for `max_batch` whole contexts). Raises
        InputError, RecipeError.
        """
        facts = model.facts
        self.max_batch = (
            facts.max_batch
            if max_batch is None
            else as_count(max_batch, "max_batch", 1, facts.max_batch)
        )
        self.max_waiting = as_count(max_waiting, "max_waiting", 1)
        self._model = model
        decoding = model.decoding()
        self._alone, chunks, step = _sharing(model, *decoding)
        schedule = chosen(model.recipe)
        if not chunks and schedule.chunks:
            schedule = ContinuousBatching()
        everything = self.max_batch * -(-facts.max_context // BLOCK)
        count = everything if blocks is None else as_count(blocks, "blocks", 1)
        self._limits = Limits(self.max_batch, count, BLOCK, step, recompute=chunks)
        self._queue = Queue()
        self._closing = False
        self._batcher = Batcher(
            model, decoding, self._queue, schedule, self._limits, bool(self._alone)
        )
        self._thread = Thread(target=self._work, name="accel-engine", daemon=True)
        self._thread.start()

    @property
    def how(self) -> str:
        """How requests share the model, in a sentence."""
        name = type(self._batcher.schedule).__module__.rpartition(".")[2].replace("_", "-")
        if self._alone:
            return f"requests take turns, each in a session of its own: {self._alone} ({name})"
        prompts = "in chunks" if self._batcher.schedule.chunks else "whole"
        if self._batcher.prompt_thread is not None:
            prompts += (
                f" on a part of {self._batcher.prompt_thread.cores} cores while others decode"
            )
        return f"requests share calls; prompts run {prompts} ({name})"

    @property
    def stays(self) -> str:
        """Why requests cannot go on in another engine of the model; "": they can."""
        if self._alone:
            return self._alone
        with self._model.session() as session:
            session.run(np.zeros((1, 1), np.int64))
            try:
                session.export_row()
            except SavedSessionError as error:
                return str(error)
        return ""

    def submit(
        self,
        request: Request,
        *,
        listener: Callable[[Ticket, Event | Handed | BaseException], None] | None = None,
        hands: bool = False,
        handoff: Handed | None = None,
    ) -> Ticket:
        """Take a request. Raises Full where as many wait as may, and InputError where it can never be served.

        `listener`: gets its events in the engine's thread, in place of who iterates over the ticket. `hands`: run its
        prompt and take its first token, then give the listener the rest as `Handed`. `handoff`: what another engine of
        this model handed over; its tokens are not told again.
        """
        prepared = self._model.prepare(
            request.prompt,
            request.params,
            encoder_input=request.encoder_input,
            adapter=request.adapter,
            sample=request.sample,
            marks=request.marks,
            prompt_logprobs=request.prompt_logprobs if handoff is None else None,
        )
        row = prepared.sample.row
        if row.finish:
            raise InputError(
                f"the prompt has {row.prompt.size} tokens, which leaves no room for one more in max_context = "
                f"{self._model.facts.max_context}; shorten it, or build with more: max_context=…"
            )
        ticket = Ticket(int(row.prompt.size), self._wake, listener)
        with self._queue.changed:
            number, now = int(self._queue.counts["requests_total"]), monotonic()
            job = Job(number, prepared, ticket, now, handoff, hands, request.only_prompt)
            if not self._limits.fits(job.task(0)):
                raise InputError(
                    f"the request may hold {job.most} tokens, and this engine has room for "
                    f"{self._limits.blocks * BLOCK}; shorten it, lower max_tokens, or give the engine more blocks"
                )
            if self._closing:
                raise InputError("this engine is closed; make another")
            if len(self._queue.jobs) >= self.max_waiting:
                raise Full(f"{self.max_waiting} requests wait already; try again later")
            self._queue.jobs.append(job)
            self._queue.counts["requests_total"] += 1
            self._queue.changed.notify_all()
        return ticket

    @property
    def stats(self) -> Mapping[str, float]:
        """`running` and `waiting` requests; since the start `requests_total`, `prompt_tokens_total`,
        `generated_tokens_total`, `preemptions_total`, `reused_tokens_total` (of prompts, taken over by `kv.reuse`), and
        `drafts_total` that were checked, `drafted_total` and `accepted_total` tokens of requests that ended, and
        `draft_drafted_total` and `draft_accepted_total` of them, each followed by a stroke and the position 1, 2, … in
        the draft (of trees, the level); `kv_bytes` of state now.
        """
        with self._queue.changed:
            return {
                "running": len(self._batcher.running),
                "waiting": len(self._queue.jobs),
                **self._queue.counts,
            }

    def close(self, *, drain: bool = True, timeout: float | None = None) -> None:
        """Take no more requests, let those taken end (`drain`; those that run after `timeout` seconds are cancelled),
        or cancel all of them, and end the thread. Closing again has no effect. The model stays open.
        """
        with self._queue.changed:
            self._closing = True
            self._queue.halted |= not drain
            self._queue.changed.notify_all()
        self._thread.join(timeout)
        with self._queue.changed:
            self._queue.halted = True
            self._queue.changed.notify_all()
        self._thread.join()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _wake(self) -> None:
        with self._queue.changed:
            self._queue.changed.notify_all()

    # What follows is of the engine's own thread.

    def _work(self) -> None:
        while True:
            with self._queue.changed:
                while not (self._queue.jobs or self._batcher.running or self._closing):
                    self._queue.changed.wait()
                if not (self._queue.jobs or self._batcher.running):
                    break
            try:
                self._batcher.iterate()
            except Exception as error:  # no request is left without an end
                self._batcher.abandon(error)
        self._batcher.close()


def _sharing(model: CompiledModel, loop: Loop, context: DecodeContext) -> tuple[str, bool, int]:
    """Why requests cannot share a session (""; they can), whether prompts may run in chunks, and the most tokens
    that a round adds to a row.
    """
    if not in_rounds(loop):
        return "its loop has no rounds", False, 1
    with model.session() as session:
        able = session.capabilities
        if not able.joins:
            return "rows cannot join its sessions (session.capabilities.joins)", False, 1
        row = Row(
            np.zeros(1, np.int64),
            Standard(),
            np.random.default_rng(0),
            limit=1,
            max_context=model.facts.max_context,
        )
        rounds = loop.rounds(session, [row], context)
        try:
            joins, step = rounds.joins, rounds.widest
        finally:
            rounds.close()
    if not joins:
        return "rows cannot join rounds of its loop and drafter", False, 1
    return "", able.chunks, step
