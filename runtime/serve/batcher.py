"""What runs the requests of an engine: which decode together, in which sessions, and whose prompts run."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Sequence
from time import monotonic
from typing import Any, cast

from accel.ir.errors import AccelError, InputError
from accel.runtime.decode.context import DecodeContext
from accel.runtime.decode.rounds import Rounds
from accel.runtime.loop import Base as Loop
from accel.runtime.model.compiled import CompiledModel
from accel.runtime.schedule import Base as Schedule
from accel.runtime.schedule import Limits, Plan, State
from accel.runtime.serve.job import Job
from accel.runtime.serve.ledger import Ledger
from accel.runtime.serve.prompt_thread import PromptThread
from accel.runtime.serve.queue import Queue


class Batcher:
    """An iteration follows the plan of the recipe's `schedule`: the requests that decode take a round together, and
    prompts run, each in a session of its own, which then joins. One thread uses it.

    running: the requests that run, by number, in the order of arrival.
    """

    def __init__(
        self,
        model: CompiledModel,
        decoding: tuple[Loop, DecodeContext],
        queue: Queue,
        schedule: Schedule,
        limits: Limits,
        alone: bool,
    ):
        """`alone`: each request runs in a session of its own, and they take turns."""
        self._model, self._queue, self._limits, self._alone = model, queue, limits, alone
        self._loop, self._context = decoding
        self.schedule = schedule
        self.ledger = Ledger(limits.blocks)
        self.running: dict[int, Job] = {}
        # those that decode together, by `Session.adapters`
        self._groups: dict[tuple[int, ...], Rounds] = {}
        self._short = False  # memory ran out: nothing is admitted before a request has left
        cores = model.threads or 1
        self.prompt_thread = PromptThread(cores) if schedule.splits_cores and cores > 1 else None

    def close(self) -> None:
        """No request runs any more."""
        if self.prompt_thread is not None:
            self.prompt_thread.close()

    def iterate(self) -> None:
        """Plan, reserve, run, commit."""
        self._look_beside()
        self._sweep()
        with self._queue.changed:
            waiting = [] if self._short and self.running else list(self._queue.jobs)
        if not waiting and not self.running:
            return
        hits = self.schedule.reads_hits
        tasks = [job.task(0, job.prepared.known() if hits else 0) for job in waiting]
        held = [job.task(self.ledger.owned(i)) for i, job in self.running.items()]
        busy = self._busy
        state = State(tasks, held, self.ledger.free, monotonic(), None if busy is None else busy.id)
        plan = self.schedule.plan(state, self._limits)
        if not (plan.decodes or plan.chunks or plan.preempted or plan.refused or busy):
            raise AccelError("the schedule plans nothing, though requests wait; it is broken")
        self._preempt([self.running[i] for i in plan.preempted])
        self._admit(plan, waiting)
        self.ledger.reserve(plan.blocks)
        if self.prompt_thread is None:
            self._decode(plan.decodes)
            for i, tokens in plan.chunks:
                self._prompt(self.running[i], tokens)
        else:
            self._both(self.prompt_thread, plan, state)
        self.ledger.commit()
        self.ledger.check()

    def _both(self, worker: PromptThread, plan: Plan, state: State) -> None:
        """Prompts beside a round, each on its part of the cores; a phase without the other has all of them."""
        for i, tokens in plan.chunks:
            if plan.decodes:
                limits, shares = self._limits, worker.shares
                worker.share = self.schedule.share(state, limits, shares, worker.share)
            threads = round(worker.share * worker.cores) if plan.decodes else worker.cores
            worker.start(self.running[i], tokens, threads, self._run_prompt)
        part = worker.part
        if not plan.decodes:
            self._look_beside(wait=True)
            return
        left = worker.cores if part is None else worker.cores - part.threads
        for group in self._groups.values():
            group.session.spread(left)
        self._decode(plan.decodes)

    @property
    def _busy(self) -> Job | None:
        """The request a part of whose prompt runs beside."""
        part = None if self.prompt_thread is None else self.prompt_thread.part
        return None if part is None else part.job

    def _look_beside(self, wait: bool = False) -> None:
        """Go on with a request when a part of its prompt ran beside."""
        part = None if self.prompt_thread is None else self.prompt_thread.ended(wait)
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
        with self._queue.changed:
            gone = [job for job in self._queue.jobs if job.over or self._queue.halted]
            for job in gone:
                self._queue.jobs.remove(job)
        for job in gone:
            job.end()
        busy = self._busy
        running = [job for job in self.running.values() if job is not busy]
        over = [job for job in running if job.over or self._queue.halted]
        self._leave(over)
        for job in over:
            self._drop(job, job.row.error)
        sessions = [group.session for group in self._groups.values()]
        sessions += [job.session for job in running if job.session is not None]
        with self._queue.changed:
            self._queue.counts["kv_bytes"] = sum(int(one.stats["kv_bytes"]) for one in sessions)

    def _drop(self, job: Job, error: BaseException | None) -> None:
        """A request that runs is over, and in no group any more."""
        job.close()
        self.ledger.drop(job.id)
        self._short = False
        with self._queue.changed:
            del self.running[job.id]
            if not self.running:
                self._queue.counts["kv_bytes"] = 0
            self._queue.count_drafts(job.row)
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
            self.ledger.drop(job.id)
            job.again()
            with self._queue.changed:
                del self.running[job.id]
                self._queue.jobs.appendleft(job)
                self._queue.counts["preemptions_total"] += 1

    def _spared(self, job: Job, error: Exception) -> bool:
        """Memory ran out, and others run: let a request run again when one of them has left."""
        if not isinstance(error, MemoryError) or not self._limits.recompute:
            return False
        if len(self.running) == 1:
            return False
        self._preempt([job])
        self._short = True
        return True

    def _admit(self, plan: Plan, waiting: Sequence[Job]) -> None:
        """Requests of the plan leave the queue."""
        admitted = {i for i, _ in plan.chunks}
        with self._queue.changed:
            for job in waiting:
                if job.id in admitted or job.id in plan.refused:
                    self._queue.jobs.remove(job)
                if job.id in admitted:
                    self.running[job.id] = job
            self.running = dict(sorted(self.running.items()))
        for job in waiting:
            if job.id in plan.refused:
                job.end(InputError("the request can never fit into this engine; shorten it"))

    def _decode(self, ids: Sequence[int]) -> None:
        """A round of all that decode."""
        if self._alone:
            for i in ids:
                self._pull(self.running[i])
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
        if job.handoff is not None:
            job.session = self._model.import_row(job.handoff.state)
            job.rounds = self._loop.rounds(job.session, [job.row], self._context)
            return
        if job.session is None:
            job.session = job.prepared.open()
            if self._alone:
                given = self._loop.tokens(job.session, [job.row], self._context)
                job.tokens = cast(Generator[Any], given)
            else:
                job.rounds = self._loop.rounds(job.session, [job.row], self._context)
                # a whole one finds for itself what is known of it; what is scored has to run
                if tokens < job.left.size and job.scores is None:
                    job.session.reuse(job.left[None])
        if threads is not None:
            job.session.spread(threads)
        left = job.left
        if job.scores is not None and not self._limits.recompute:
            with job.prepared.open() as session:  # its own takes the prompt whole
                job.scores.run(session, job.row.prompt[:-1])
        if self._alone:
            return  # its first token takes them
        if tokens < left.size or job.row.tokens:
            known = max(0, int(job.session.lengths[0]) - job.computed)  # more than was planned
            part, ahead = left[None, known:tokens], job.ahead - known
            if 0 < ahead <= part.shape[1]:  # it runs again: its prompt ends before what it made
                job.session.prompt(part[:, :ahead])
                part = part[:, ahead:]
            if part.size:
                job.run(part[0])
        else:
            if job.scores is not None:
                job.run(left[:-1])
            if not job.only_prompt:
                assert job.rounds is not None
                list(job.rounds.start())

    def _ran_prompt(self, job: Job, tokens: int) -> None:
        """So many tokens of it ran: what comes of it, in the engine's own thread."""
        whole = tokens == job.left.size
        job.ran(tokens)
        reused = int(job.session.stats["reused"]) if whole and job.session is not None else 0
        job.ticket.reuse(reused)
        if whole and job.only_prompt:
            job.stop()
        elif self._alone:
            self._pull(job)
        elif whole:
            self._tell([job])
        if not whole:
            return
        if job.handoff is None:
            self._queue.count("prompt_tokens_total", job.row.prompt.size)
            self._queue.count("reused_tokens_total", reused)
        job.handoff = None
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
        return [job for job in self.running.values() if id(job.row) in rows]

    def _fail(self, adapters: tuple[int, ...], error: Exception) -> None:
        """A group cannot go on."""
        group = self._groups[adapters]
        jobs = self._of(group)
        self._leave(jobs)
        for job in jobs:
            self._drop(job, error)

    def abandon(self, error: Exception) -> None:
        """The engine itself failed: all that it has taken fail with it."""
        if self.prompt_thread is not None:
            self.prompt_thread.ended(wait=True)
        with self._queue.changed:
            waiting, self._queue.jobs = list(self._queue.jobs), deque()
            self._queue.counts["kv_bytes"] = 0
        self._short = False
        running, self.running = list(self.running.values()), {}
        groups, self._groups = list(self._groups.values()), {}
        self.ledger = Ledger(self._limits.blocks)
        for group in groups:
            group.close()
            group.session.close()
        for job in (*running, *waiting):
            job.close()
            job.end(error)

    def _tell(self, jobs: Sequence[Job]) -> None:
        self._queue.count("generated_tokens_total", sum(job.tell() for job in jobs))


def _held(group: Rounds) -> list[int]:
    """Tokens of each row, and of those that its session holds."""
    return [*(len(row.tokens) for row in group.rows), *group.session.lengths.tolist()]
