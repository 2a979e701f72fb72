"""An engine: one thread that serves the requests of many over one loaded model."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Generator, Mapping, Sequence
from threading import Condition, Thread
from time import monotonic
from typing import Any, cast

import numpy as np

from accel.ir.errors import AccelError, InputError, SavedSessionError
from accel.runtime.decode.rounds import Rounds
from accel.runtime.decode.row import Row
from accel.runtime.inputs.prompts import as_count
from accel.runtime.model.compiled import CompiledModel
from accel.runtime.sample.standard import Standard
from accel.runtime.schedule import Limits, Plan, State, chosen
from accel.runtime.schedule.continuous_batching import ContinuousBatching
from accel.runtime.serve.beside import Beside
from accel.runtime.serve.job import Job
from accel.runtime.serve.ledger import Ledger
from accel.runtime.serve.request import Event, Full, Handed, Request, Ticket, Usage

__all__ = ["Engine", "Event", "Full", "Handed", "Request", "Ticket", "Usage"]

BLOCK = 16  # tokens
COUNTS = (
    "requests_total", "prompt_tokens_total", "generated_tokens_total", "preemptions_total",
    "reused_tokens_total", "drafted_total", "accepted_total", "kv_bytes",
)  # fmt: skip


class Engine:
    """Serves requests of any threads over one model, whose sessions its own thread runs. Each request gets the tokens
    that `generate` gives it alone.

    An iteration follows the plan of the recipe's `schedule`: the requests that decode take a round together, and
    prompts run, each in a session of its own, which then joins. `how` says where requests cannot share a session.
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
        self._loop, self._context = model.decoding()
        self._alone, chunks, step = self._sharing()
        self._schedule = chosen(model.recipe)
        if not chunks and self._schedule.chunks:
            self._schedule = ContinuousBatching()
        everything = self.max_batch * -(-facts.max_context // BLOCK)
        count = everything if blocks is None else as_count(blocks, "blocks", 1)
        self._limits = Limits(self.max_batch, count, BLOCK, step, recompute=chunks)
        self._ledger = Ledger(count)
        self._changed = Condition()
        self._waiting = deque[Job]()
        self._running: dict[int, Job] = {}  # by number, in the order of arrival
        # those that decode together, by `Session.adapters`
        self._groups: dict[tuple[int, ...], Rounds] = {}
        self._short = False  # memory ran out: nothing is admitted before a request has left
        self._closing = self._halted = False
        self._counts = Counter[str](dict.fromkeys(COUNTS, 0))
        cores = model.threads or 1
        self._beside = Beside(cores) if self._schedule.beside and cores > 1 else None
        self._thread = Thread(target=self._work, name="accel-engine", daemon=True)
        self._thread.start()

    @property
    def how(self) -> str:
        """How requests share the model, in a sentence."""
        name = type(self._schedule).__module__.rpartition(".")[2].replace("_", "-")
        if self._alone:
            return f"requests take turns, each in a session of its own: {self._alone} ({name})"
        prompts = "in chunks" if self._schedule.chunks else "whole"
        if self._beside is not None:
            prompts += f" on a part of {self._beside.cores} cores while others decode"
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
        given: Handed | None = None,
    ) -> Ticket:
        """Take a request. Raises Full where as many wait as may, and InputError where it can never be served.

        `listener`: gets its events in the engine's thread, in place of who iterates over the ticket. `hands`: run its
        prompt and take its first token, then give the listener the rest as `Handed`. `given`: what another engine of
        this model handed over; its tokens are not told again.
        """
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
                f"{self._model.facts.max_context}; shorten it, or build with more: max_context=…"
            )
        ticket = Ticket(int(row.prompt.size), self._wake, listener)
        with self._changed:
            number, now = int(self._counts["requests_total"]), monotonic()
            job = Job(number, prepared, ticket, now, given, hands)
            if not self._limits.fits(job.task(0)):
                raise InputError(
                    f"the request may hold {job.most} tokens, and this engine has room for "
                    f"{self._limits.blocks * BLOCK}; shorten it, lower max_tokens, or give the engine more blocks"
                )
            if self._closing:
                raise InputError("this engine is closed; make another")
            if len(self._waiting) >= self.max_waiting:
                raise Full(f"{self.max_waiting} requests wait already; try again later")
            self._waiting.append(job)
            self._counts["requests_total"] += 1
            self._changed.notify_all()
        return ticket

    @property
    def stats(self) -> Mapping[str, float]:
        """`running` and `waiting` requests; since the start `requests_total`, `prompt_tokens_total`,
        `generated_tokens_total`, `preemptions_total`, `reused_tokens_total` (of prompts, taken over by `kv.reuse`), and
        `drafted_total` and `accepted_total` tokens of requests that ended; `kv_bytes` of state now.
        """
        with self._changed:
            return {"running": len(self._running), "waiting": len(self._waiting), **self._counts}

    def close(self, *, drain: bool = True, timeout: float | None = None) -> None:
        """Take no more requests, let those taken end (`drain`; those that run after `timeout` seconds are cancelled),
        or cancel all of them, and end the thread. Closing again has no effect. The model stays open.
        """
        with self._changed:
            self._closing = True
            self._halted |= not drain
            self._changed.notify_all()
        self._thread.join(timeout)
        with self._changed:
            self._halted = True
            self._changed.notify_all()
        self._thread.join()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _sharing(self) -> tuple[str, bool, int]:
        """Why requests cannot share a session (""; they can), whether prompts may run in chunks, and the most tokens
        that a round adds to a row.
        """
        if not self._loop.in_rounds:
            return "its loop has no rounds", False, 1
        with self._model.session() as session:
            able = session.capabilities
            if not able.joins:
                return "rows cannot join its sessions (session.capabilities.joins)", False, 1
            row = Row(
                np.zeros(1, np.int64),
                Standard(),
                np.random.default_rng(0),
                limit=1,
                max_context=self._model.facts.max_context,
            )
            rounds = self._loop.rounds(session, [row], self._context)
            try:
                joins, step = rounds.joins, rounds.widest
            finally:
                rounds.close()
        if not joins:
            return "rows cannot join rounds of its loop and drafter", False, 1
        return "", able.chunks, step

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    # What follows is of the engine's own thread.

    def _work(self) -> None:
        while True:
            with self._changed:
                while not (self._waiting or self._running or self._closing):
                    self._changed.wait()
                if not (self._waiting or self._running):
                    break
            try:
                self._iteration()
            except Exception as error:  # no request is left without an end
                self._abandon(error)
        if self._beside is not None:
            self._beside.close()

    def _iteration(self) -> None:
        """Plan, reserve, run, commit."""
        self._look_beside()
        self._sweep()
        with self._changed:
            waiting = [] if self._short and self._running else list(self._waiting)
        if not waiting and not self._running:
            return
        tasks = [job.task(0) for job in waiting]
        held = [job.task(self._ledger.owned(i)) for i, job in self._running.items()]
        busy = self._busy
        state = State(
            tasks, held, self._ledger.free, monotonic(), None if busy is None else busy.id
        )
        plan = self._schedule.plan(state, self._limits)
        if not (plan.decodes or plan.chunks or plan.preempted or plan.refused or busy):
            raise AccelError("the schedule plans nothing, though requests wait; it is broken")
        self._preempt([self._running[i] for i in plan.preempted])
        self._admit(plan, waiting)
        self._ledger.reserve(plan.blocks)
        if self._beside is None:
            self._decode(plan.decodes)
            for i, tokens in plan.chunks:
                self._prompt(self._running[i], tokens)
        else:
            self._both(self._beside, plan, state)
        self._ledger.commit()
        self._ledger.check()

    def _both(self, beside: Beside, plan: Plan, state: State) -> None:
        """Prompts beside a round, each on its part of the cores; a phase without the other has all of them."""
        for i, tokens in plan.chunks:
            if plan.decodes:
                limits, shares = self._limits, beside.shares
                beside.share = self._schedule.share(state, limits, shares, beside.share)
            threads = round(beside.share * beside.cores) if plan.decodes else beside.cores
            beside.start(self._running[i], tokens, threads, self._run_prompt)
        part = beside.part
        if not plan.decodes:
            self._look_beside(wait=True)
            return
        left = beside.cores if part is None else beside.cores - part.threads
        for group in self._groups.values():
            group.session.spread(left)
        self._decode(plan.decodes)

    @property
    def _busy(self) -> Job | None:
        """The request a part of whose prompt runs beside."""
        part = None if self._beside is None else self._beside.part
        return None if part is None else part.job

    def _look_beside(self, wait: bool = False) -> None:
        """Go on with a request when a part of its prompt ran beside."""
        part = None if self._beside is None else self._beside.ended(wait)
        if part is None:
            return
        if (error := part.future.exception()) is None:
            self._ran_prompt(part.job, part.tokens)
        elif isinstance(error, Exception):
            if not self._spared(part.job, error):
                self._drop(part.job, error)
        else:
            raise error

    def _sweep(self) -> None:
        """Let go of requests that ended, failed or were cancelled."""
        with self._changed:
            gone = [job for job in self._waiting if job.over or self._halted]
            for job in gone:
                self._waiting.remove(job)
        for job in gone:
            job.end()
        busy = self._busy
        running = [job for job in self._running.values() if job is not busy]
        over = [job for job in running if job.over or self._halted]
        self._leave(over)
        for job in over:
            self._drop(job, job.row.error)
        sessions = [group.session for group in self._groups.values()]
        sessions += [job.session for job in running if job.session is not None]
        with self._changed:
            self._counts["kv_bytes"] = sum(int(one.stats["kv_bytes"]) for one in sessions)

    def _drop(self, job: Job, error: BaseException | None) -> None:
        """A request that runs is over, and in no group any more."""
        job.close()
        self._ledger.drop(job.id)
        self._short = False
        with self._changed:
            del self._running[job.id]
            if not self._running:
                self._counts["kv_bytes"] = 0
            for name in ("drafted", "accepted"):
                self._counts[f"{name}_total"] += job.row.drafting[name]
        job.end(error)

    def _leave(self, jobs: Sequence[Job]) -> None:
        """Take requests out of their groups."""
        gone = {id(job.row) for job in jobs}
        for adapters, group in list(self._groups.items()):
            rows = [i for i, row in enumerate(group.rows) if id(row) in gone]
            if len(rows) == len(group.rows):
                del self._groups[adapters]
                group.close()
                group.session.close()
            elif rows:
                group.leave(rows)

    def _preempt(self, jobs: Sequence[Job]) -> None:
        """They lose what they hold, and wait in front of the others."""
        self._leave(jobs)
        for job in sorted(jobs, key=lambda job: -job.id):
            self._ledger.drop(job.id)
            job.again()
            with self._changed:
                del self._running[job.id]
                self._waiting.appendleft(job)
                self._counts["preemptions_total"] += 1

    def _spared(self, job: Job, error: Exception) -> bool:
        """Memory ran out, and others run: let a request run again when one of them has left."""
        if not isinstance(error, MemoryError) or not self._limits.recompute:
            return False
        if len(self._running) == 1:
            return False
        self._preempt([job])
        self._short = True
        return True

    def _admit(self, plan: Plan, waiting: Sequence[Job]) -> None:
        """Requests of the plan leave the queue."""
        admitted = {i for i, _ in plan.chunks}
        with self._changed:
            for job in waiting:
                if job.id in admitted or job.id in plan.refused:
                    self._waiting.remove(job)
                if job.id in admitted:
                    self._running[job.id] = job
            self._running = dict(sorted(self._running.items()))
        for job in waiting:
            if job.id in plan.refused:
                job.end(InputError("the request can never fit into this engine; shorten it"))

    def _decode(self, ids: Sequence[int]) -> None:
        """A round of all that decode."""
        if self._alone:
            for i in ids:
                self._pull(self._running[i])
            return
        for adapters, group in list(self._groups.items()):
            jobs, held = self._of(group), _held(group)
            try:
                group.run()
            except Exception as error:  # a call of all of them failed
                newest = max(jobs, key=lambda job: job.id)
                if _held(group) != held or not self._spared(newest, error):
                    self._fail(adapters, error)
            else:
                self._tell(jobs)

    def _prompt(self, job: Job, tokens: int) -> None:
        """Run so many tokens of a prompt; behind its last one the request takes a token, and joins the others."""
        try:
            self._run_prompt(job, tokens)
        except Exception as error:
            if not self._spared(job, error):
                self._drop(job, error)
        else:
            self._ran_prompt(job, tokens)

    def _run_prompt(self, job: Job, tokens: int, threads: int | None = None) -> None:
        """The calls of it, in any thread. `threads`: of each call; None: those of the model."""
        if job.given is not None:
            job.session = self._model.import_row(job.given.state)
            job.rounds = self._loop.rounds(job.session, [job.row], self._context)
            return
        if job.session is None:
            job.session = job.prepared.open()
            if self._alone:
                given = self._loop.tokens(job.session, [job.row], self._context)
                job.tokens = cast(Generator[Any], given)
            else:
                job.rounds = self._loop.rounds(job.session, [job.row], self._context)
                if tokens < job.left.size:  # a whole one finds for itself what is known of it
                    job.session.reuse(job.left[None])
        if threads is not None:
            job.session.spread(threads)
        left = job.left
        if self._alone:
            return  # its first token takes them
        if tokens < left.size or job.row.tokens:
            known = max(0, int(job.session.lengths[0]) - job.computed)  # more than was planned
            part, ahead = left[None, known:tokens], job.ahead - known
            if 0 < ahead <= part.shape[1]:  # it runs again: its prompt ends before what it made
                job.session.prompt(part[:, :ahead])
                part = part[:, ahead:]
            if part.size:
                job.session.run(part, last_only=True)
        else:
            assert job.rounds is not None
            list(job.rounds.start())

    def _ran_prompt(self, job: Job, tokens: int) -> None:
        """So many tokens of it ran: what comes of it, in the engine's own thread."""
        whole = tokens == job.left.size
        job.ran(tokens)
        if self._alone:
            self._pull(job)
        elif whole:
            self._tell([job])
        if not whole:
            return
        if job.given is None:
            self._count("prompt_tokens_total", job.row.prompt.size)
            if job.session is not None:
                self._count("reused_tokens_total", int(job.session.stats["reused"]))
        job.given = None
        if job.hands and not job.over:
            self._hand(job)
        elif not self._alone and not job.over:
            self._join(job)

    def _hand(self, job: Job) -> None:
        """It goes on elsewhere."""
        try:
            job.hand()
        except Exception as error:
            self._drop(job, error)
        else:
            self._drop(job, None)

    def _join(self, job: Job) -> None:
        """Let a request whose prompt has run decode with the others of its adapter."""
        rounds = job.rounds
        assert rounds is not None
        adapters = rounds.session.adapters
        group = self._groups.get(adapters)
        if group is None:
            self._groups[adapters] = rounds
        else:
            try:
                group.join(rounds)
            except Exception as error:
                if len(group.rows) == group.session.batch and job.row not in group.rows:
                    if not self._spared(job, error):  # nothing has changed
                        self._drop(job, error)
                else:
                    self._fail(adapters, error)
                return
        job.rounds = job.session = None

    def _pull(self, job: Job) -> None:
        """The next token of a request that nothing joins."""
        assert job.tokens is not None
        try:
            next(job.tokens, None)
        except Exception as error:
            self._drop(job, error)
        else:
            self._tell([job])

    def _of(self, group: Rounds) -> list[Job]:
        """The requests of a group."""
        rows = {id(row) for row in group.rows}
        return [job for job in self._running.values() if id(job.row) in rows]

    def _fail(self, adapters: tuple[int, ...], error: Exception) -> None:
        """A group cannot go on."""
        group = self._groups[adapters]
        jobs = self._of(group)
        self._leave(jobs)
        for job in jobs:
            self._drop(job, error)

    def _abandon(self, error: Exception) -> None:
        """The engine itself failed: all that it has taken fail with it."""
        if self._beside is not None:
            self._beside.ended(wait=True)
        with self._changed:
            waiting, self._waiting = list(self._waiting), deque()
            self._counts["kv_bytes"] = 0
        self._short = False
        running, self._running = list(self._running.values()), {}
        groups, self._groups = list(self._groups.values()), {}
        self._ledger = Ledger(self._limits.blocks)
        for group in groups:
            group.close()
            group.session.close()
        for job in (*running, *waiting):
            job.close()
            job.end(error)

    def _tell(self, jobs: Sequence[Job]) -> None:
        self._count("generated_tokens_total", sum(job.tell() for job in jobs))

    def _count(self, name: str, more: int) -> None:
        with self._changed:
            self._counts[name] += more


def _held(group: Rounds) -> list[int]:
    """Tokens of each row, and of those that its session holds."""
    return [*(len(row.tokens) for row in group.rows), *group.session.lengths.tolist()]
