"""A schedule in simulation: an engine's own `plan`, `route` and `share` over a trace, with the ledger of blocks that
engines have; the calls of the model are a sum of costs.
"""

from __future__ import annotations

import csv
import heapq
import json
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from accel.ir.errors import AccelError
from accel.runtime.schedule import Base, Limits, Place, State, Task
from accel.runtime.serve.ledger import Ledger


class Lost(AssertionError):
    """A request, a token or a block is gone, or is in two places."""


@dataclass(frozen=True)
class Asked:
    """A request of a trace: seconds, tokens, tokens."""

    arrival: float
    prompt: int
    output: int


@dataclass(frozen=True)
class Costs:
    """Seconds of calls, on all cores. A prompt's: `call` + `token` for each of its tokens + `pair` for each key that
    one of them reads. A round's: `round` + `row` for each row + `slot` for each slot that it reads, rows padded to the
    longest. State that moves to another process: `move` + `byte` for each token. An iteration: `iteration` beside them.
    On the part r of the cores the token, pair and row costs are divided by r, and all others by min(1, r / bandwidth).
    """

    call: float = 1e-3
    token: float = 1e-4
    pair: float = 0.0
    round: float = 1e-3
    row: float = 1e-4
    slot: float = 0.0
    move: float = 1e-3
    byte: float = 1e-6
    bandwidth: float = 0.5
    iteration: float = 0.0

    def prompt(self, tokens: int, before: int, part: float = 1.0) -> float:
        pairs = tokens * before + tokens * (tokens + 1) / 2
        memory = min(1.0, part / self.bandwidth)
        return self.call / memory + (self.token * tokens + self.pair * pairs) / part

    def decode(self, contexts: Sequence[int], part: float = 1.0) -> float:
        if not contexts:
            return 0.0
        rows, memory = len(contexts), min(1.0, part / self.bandwidth)
        return (self.round + self.slot * rows * max(contexts)) / memory + self.row * rows / part

    def moved(self, tokens: int) -> float:
        return self.move + self.byte * tokens


@dataclass
class Result:
    """When each request's tokens came, and what the run was."""

    asked: Sequence[Asked]
    tokens: list[list[float]]
    refused: set[int] = field(default_factory=set)
    preemptions: int = 0
    moved: int = 0  # tokens whose state went to another process

    def check(self) -> Result:
        """Raise Lost where a request is not served once and whole, or a token comes before it can."""
        for i, (one, times) in enumerate(zip(self.asked, self.tokens, strict=True)):
            if len(times) != (0 if i in self.refused else one.output):
                raise Lost(f"request {i} got {len(times)} tokens of {one.output}")
            if times and (times[0] < one.arrival or any(np.diff(times) < 0)):
                raise Lost(f"request {i} got a token before its time")
        return self

    @property
    def figures(self) -> dict[str, float]:
        """Seconds, and tokens per second."""
        served = [(one, t) for one, t in zip(self.asked, self.tokens, strict=True) if t]
        if not served:
            return {}
        first = np.array([t[0] - one.arrival for one, t in served])
        gaps = np.concatenate([[0.0], *(np.diff(t) for _, t in served)])[1:]
        gaps = gaps if gaps.size else np.zeros(1)
        span = max(t[-1] for _, t in served) - min(one.arrival for one, _ in served)
        return {
            "ttft_median": float(np.median(first)),
            "ttft_p99": float(np.percentile(first, 99)),
            "gap_median": float(np.median(gaps)),
            "gap_p99": float(np.percentile(gaps, 99)),
            "tokens_per_second": sum(len(t) for _, t in served) / span if span else 0.0,
            "seconds": span,
            "preemptions": self.preemptions,
            "moved_tokens": self.moved,
        }


class _Process:
    """An engine without a model. A request that comes with its state (`given`) runs no prompt: it is taken over."""

    def __init__(self, world: World, number: int, home: str):
        self.world, self.number, self.home = world, number, home
        self.ledger = Ledger(world.limits.blocks)
        self.waiting = deque[int]()
        self.running: list[int] = []
        self.tasks: dict[int, Task] = {}
        self.given: set[int] = set()
        self.pending: dict[int, int] = {}  # of prompts that are to run here
        self.held: dict[int, int] = {}
        self.busy: tuple[int, int, float] | None = None  # request, tokens, part
        self.part = 0.0  # of the cores that prompts get
        self.asleep = True

    def place(self) -> Place:
        limits = self.world.limits
        capacity = limits.blocks * limits.block
        return Place(self.home, sum(self.pending.values()), sum(self.held.values()), capacity)

    def add(self, task: Task, now: float) -> None:
        self.tasks[task.id] = task
        self.waiting.append(task.id)
        self.wake(now)

    def wake(self, now: float) -> None:
        if self.asleep:
            self.asleep = False
            self.world.at(now, self.iterate)

    def iterate(self, now: float) -> None:
        """Plan at `now`, and say when what was planned is through."""
        if not self.waiting and not self.running:
            self.asleep = True
            return
        world, limits, costs = self.world, self.world.limits, self.world.costs
        state = self._state(now)
        plan = world.schedule.plan(state, limits)
        for i in plan.refused:
            self.waiting.remove(i)
            world.refuse(i)
        for i in sorted(plan.preempted, reverse=True):
            self.ledger.drop(i)
            self.running.remove(i)
            self.waiting.appendleft(i)
            task = self.tasks[i]
            length = task.computed if task.decodes else task.length
            self.tasks[i] = replace(task, computed=0, length=length, blocks=0)
            world.result.preemptions += 1
        for i, _ in plan.chunks:
            if i in self.waiting:
                self.waiting.remove(i)
                self.running.append(i)
        self.running.sort()
        self.ledger.reserve(plan.blocks)
        self.ledger.commit()
        self.ledger.check()
        beside = world.schedule.splits_cores
        if beside and plan.chunks and plan.decodes:
            self.part = world.schedule.share(state, limits, world.shares, self.part)
        if beside:
            for i, tokens in plan.chunks:
                part = self.part if plan.decodes else 1.0
                self.busy = (i, tokens, part)
                seconds = costs.iteration
                seconds += costs.prompt(tokens, self.tasks[i].computed, part * world.whole)
                world.at(now + seconds, self._prompted)
        left = 1 - self.busy[2] if self.busy else 1.0
        here = [self.tasks[i].computed for i in plan.decodes]
        now += costs.iteration + (costs.decode(here, left * world.whole) if left else 0.0)
        for i in plan.decodes:
            self._token(i, now)
        if not beside:
            for i, tokens in plan.chunks:
                now += self._seconds(i, tokens)
                self._ran(i, tokens, now)
        if beside and not plan.decodes and self.busy:
            self.asleep = True  # the prompt wakes it
            return
        if not (plan.decodes or plan.chunks or plan.preempted or plan.refused):
            raise Lost("the schedule plans nothing, though requests wait")
        world.at(now, self.iterate)

    def _state(self, now: float) -> State:
        def told(i: int) -> Task:
            return replace(self.tasks[i], blocks=self.ledger.owned(i))

        busy = None if self.busy is None else self.busy[0]
        return State(
            tuple(map(told, self.waiting)),
            tuple(map(told, self.running)),
            self.ledger.free,
            now,
            busy,
        )

    def _seconds(self, i: int, tokens: int) -> float:
        """Of a part of a prompt; what was given only has to be taken over."""
        costs, task = self.world.costs, self.tasks[i]
        if i in self.given:
            return costs.moved(tokens)
        return costs.prompt(tokens, task.computed, self.world.whole)

    def _prompted(self, now: float) -> None:
        """A part of a prompt is through, beside the rounds."""
        assert self.busy is not None
        (i, tokens, _), self.busy = self.busy, None
        self._ran(i, tokens, now)
        self.wake(now)

    def _ran(self, i: int, tokens: int, now: float) -> None:
        task = self.tasks[i] = replace(self.tasks[i], computed=self.tasks[i].computed + tokens)
        if not task.decodes:
            return
        self.pending.pop(i, None)
        if self.world.result.tokens[i]:  # it was given, or runs again
            self.given.discard(i)
            return
        self.world.token(i, now)
        if self.world.ended(i):
            self._leave(i)
        elif (then := self.world.routes[i].token) != self.number:
            self._leave(i)
            self.world.move(i, then, now)

    def _token(self, i: int, now: float) -> None:
        self.tasks[i] = replace(self.tasks[i], computed=self.tasks[i].computed + 1)
        self.world.token(i, now)
        if self.world.ended(i):
            self._leave(i)

    def _leave(self, i: int) -> None:
        self.running.remove(i)
        self.ledger.drop(i)
        self.held.pop(i, None)
        del self.tasks[i]


class World:
    """All processes of a schedule, and a clock. `cores`: of a process, for a schedule that shares them out. `apart`:
    each process has a machine; else all have an equal part of one.
    """

    def __init__(
        self, schedule: Base, limits: Limits, costs: Costs, cores: int = 2, apart: bool = True
    ):
        self.whole = 1.0 if apart else 1 / len(schedule.homes)
        self.schedule, self.limits, self.costs = schedule, limits, costs
        self.shares = [k / cores for k in range(1, cores)]
        self._events: list[tuple[float, int, Any]] = []
        self._count = 0
        self.processes = [_Process(self, i, home) for i, home in enumerate(schedule.homes)]
        self.routes: dict[int, Any] = {}

    def run(self, asked: Sequence[Asked]) -> Result:
        """Serve a trace. Raises Lost, AccelError where the schedule breaks a promise."""
        self.asked = asked
        self.result = Result(asked, [[] for _ in asked])
        for i, one in enumerate(asked):
            self.at(one.arrival, lambda now, i=i: self._arrive(i, now))
        while self._events:
            now, _, call = heapq.heappop(self._events)
            call(now)
        for one in self.processes:
            one.ledger.check()
            if one.ledger.free != self.limits.blocks:
                raise Lost(f"process {one.number} ends with {one.ledger.free} free blocks")
            if one.pending or one.held:
                raise Lost(f"process {one.number} ends with work: {one.pending}, {one.held}")
        return self.result.check()

    def at(self, now: float, call: Any) -> None:
        self._count += 1
        heapq.heappush(self._events, (now, self._count, call))

    def token(self, i: int, now: float) -> None:
        self.result.tokens[i].append(now)

    def ended(self, i: int) -> bool:
        return len(self.result.tokens[i]) == self.asked[i].output

    def refuse(self, i: int) -> None:
        self.result.refused.add(i)
        for one in self.processes:
            one.pending.pop(i, None)
            one.held.pop(i, None)

    def move(self, i: int, to: int, now: float) -> None:
        """The state of a request goes to another process, which holds it when it has blocks."""
        one, process = self.asked[i], self.processes[to]
        self.result.moved += one.prompt
        process.given.add(i)
        task = Task(i, one.prompt, one.prompt + one.output, arrived=one.arrival)
        self.at(now + self.costs.moved(one.prompt), lambda now: process.add(task, now))

    def _arrive(self, i: int, now: float) -> None:
        one = self.asked[i]
        task = Task(i, one.prompt, one.prompt + one.output, arrived=now)
        places = [process.place() for process in self.processes]
        route = self.routes[i] = self.schedule.route(places, one.prompt, task.most)
        if route is None or not self.limits.fits(task):
            if route is not None:
                self.refuse(i)
            return
        first, then = self.processes[route.prompt], self.processes[route.token]
        first.pending[i] = one.prompt
        if one.output > 1:
            then.held[i] = task.most
        moves = route.prompt != route.token
        first.add(replace(task, most=one.prompt) if moves else task, now)


def simulate(
    schedule: Base,
    asked: Sequence[Asked],
    limits: Limits,
    costs: Costs,
    cores: int = 2,
    apart: bool = True,
) -> Result:
    """What a schedule does with a trace; arguments as of `World`."""
    return World(schedule, limits, costs, cores, apart).run(asked)


def poisson(
    count: int, rate: float, prompt: float = 64, output: float = 32, seed: int = 0
) -> list[Asked]:
    """Requests of a Poisson process, `rate` a second; lengths are geometric with these means."""
    rng = np.random.default_rng(seed)
    arrivals = np.cumsum(rng.exponential(1 / rate, count))
    sizes = zip(rng.geometric(1 / prompt, count), rng.geometric(1 / output, count), strict=True)
    return [Asked(float(t), int(p), int(o)) for t, (p, o) in zip(arrivals, sizes, strict=True)]


def trace(path: Path) -> list[Asked]:
    """The requests of a file, by arrival. Raises AccelError."""
    try:
        text = path.read_text(encoding="utf-8")
        rows: Iterable[Any] = (
            map(json.loads, filter(None, text.splitlines()))
            if path.suffix == ".jsonl"
            else csv.DictReader(text.splitlines())
        )
        found = [Asked(float(r["arrival"]), int(r["prompt"]), int(r["output"])) for r in rows]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise AccelError(
            f"{path} is no trace ({type(error).__name__}: {error}); give a CSV or JSONL with arrival, prompt, output"
        ) from error
    if not found or any(one.prompt < 1 or one.output < 1 for one in found):
        raise AccelError(f"{path}: give at least one request, of 1 or more tokens each")
    return sorted(found, key=lambda one: one.arrival)
