"""Schedules in simulation: requests of a trace, what calls cost, and when each token comes.

    python tools/bench/simulate.py fit ARTIFACT --out costs.json         measure calls, fit their cost
    python tools/bench/simulate.py run --costs costs.json                schedules under Poisson arrivals
    python tools/bench/simulate.py run --costs costs.json --trace requests.csv --schedule sarathi:tokens=64
    python tools/bench/simulate.py check ARTIFACT                        one engine for real beside its simulation
    python tools/bench/simulate.py real ARTIFACT OTHER …                 engines for real, in turns, over one trace

A trace is a CSV or JSONL with the columns `arrival` (seconds), `prompt` and `output` (tokens). Every figure of `run` is
simulated. A schedule is what an engine runs: the same `plan`, `route` and `share` are called, with the same ledger of
blocks; only the calls of the model are a sum of costs. `check` runs an engine over the artifact, on this machine, in
turns with a fit. `real` runs the schedule that each artifact was built with; ratios are medians of turns.
"""

from __future__ import annotations

import csv
import heapq
import json
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from accel.ir.axis import find_axes
from accel.ir.errors import AccelError
from accel.runtime.schedule import Base, Limits, Place, State, Task, chosen
from accel.runtime.serve.ledger import Ledger

app = typer.Typer(add_completion=False, no_args_is_help=True)
SIZES = (8, 64, 192)  # tokens of prompts that are measured
ROWS = (1, 2, 4, 8)


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
        beside = world.schedule.beside
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


def fitted(features: Any, seconds: Any) -> Any:
    """Coefficients of 0 or more, by least squares of relative errors; a negative one is set to 0, and the rest anew."""
    weights = 1 / np.asarray(seconds, float)
    matrix = np.asarray(features, float) * weights[:, None]
    left = list(range(matrix.shape[1]))
    while left:
        found, *_ = np.linalg.lstsq(matrix[:, left], np.ones(len(weights)), rcond=None)
        if found.min() >= 0:
            break
        left.remove(left[int(found.argmin())])
    out = np.zeros(matrix.shape[1])
    out[left] = found if left else []
    return out


def measured(model: Any, repeats: int = 3) -> Costs:
    """The costs of a model's calls, medians, as an engine makes them: prompts into sessions of one row, and rounds of
    rows that joined.
    """
    from accel.runtime.decode.sampling_params import SamplingParams
    from accel.runtime.serve.engine import Engine, Request

    size = model.facts.max_context
    rng = np.random.default_rng(0)

    def ids(n: int) -> Any:
        return rng.integers(1, model.facts.vocab_size, n)

    prompts: dict[tuple[int, int], list[float]] = {}
    rounds: dict[tuple[int, int], list[float]] = {}
    moves: dict[int, list[float]] = {}
    with Engine(model) as engine:  # kernels are chosen, and the code is warm
        list(engine.submit(Request(ids(8), SamplingParams(max_tokens=4))))
    for _ in range(repeats):
        for tokens in (n for n in SIZES if 2 * n + 8 < size):
            group = None
            for rows in range(1, model.facts.max_batch + 1):
                start = time.perf_counter()
                session = model.session()
                logits = session.prompt(ids(tokens)[None])
                logits[0, 0].argmax()
                prompts.setdefault((tokens, 0), []).append(time.perf_counter() - start)
                if group is None:
                    group = session
                    start = time.perf_counter()
                    data = session.export_row()
                    with model.import_row(data) as other:
                        moves.setdefault(tokens, []).append((time.perf_counter() - start) / 2)
                        start = time.perf_counter()
                        other.run(ids(tokens)[None], last_only=True)
                        spent = time.perf_counter() - start
                    prompts.setdefault((tokens, tokens), []).append(spent)
                else:
                    group.join(session)
                if rows in ROWS:
                    group.run(np.ones((rows, 1), np.int64))  # buffers are bound anew
                    for _ in range(4):
                        start = time.perf_counter()
                        logits = group.run(np.ones((rows, 1), np.int64))
                        [logits[i, 0].argmax() for i in range(rows)]
                        spent = time.perf_counter() - start
                        rounds.setdefault((rows, tokens), []).append(spent)
            group.close()
    call, token, pair = fitted(
        [(1, n, n * b + n * (n + 1) / 2) for n, b in prompts],
        list(map(np.median, prompts.values())),
    )
    each, row, slot = fitted(
        [(1, n, n * c) for n, c in rounds], list(map(np.median, rounds.values()))
    )
    move, byte = fitted([(1, n) for n in moves], list(map(np.median, moves.values())))
    costs = Costs(*map(float, (call, token, pair, each, row, slot, move, byte)))
    with Engine(model) as engine:  # what an iteration takes beside its calls
        ticket = engine.submit(Request(ids(8), SamplingParams(max_tokens=64, ignore_eos=True)))
        times = [time.perf_counter() for _ in ticket]
    return replace(costs, iteration=max(0.0, float(np.median(np.diff(times))) - costs.decode([40])))


def real(model: Any, asked: Sequence[Asked], seed: int = 0) -> Result:
    """The same trace, served by an engine over the model, each request at its time."""
    from accel.runtime.serve.phases import serving

    with serving(model, max_waiting=len(asked)) as engine:
        return served(model, engine, asked, seed)


def served(model: Any, engine: Any, asked: Sequence[Asked], seed: int = 0) -> Result:
    """A trace, by an engine that is open."""
    import threading

    from accel.runtime.decode.sampling_params import SamplingParams
    from accel.runtime.serve.engine import Request

    rng = np.random.default_rng(seed)
    prompts = [rng.integers(1, model.facts.vocab_size, one.prompt) for one in asked]
    result = Result(asked, [[] for _ in asked])

    def read(i: int, ticket: Any) -> None:
        for _ in ticket:
            result.tokens[i].append(time.perf_counter() - start)

    start, readers = time.perf_counter(), []
    for i, one in enumerate(asked):
        time.sleep(max(0.0, start + one.arrival - time.perf_counter()))
        params = SamplingParams(max_tokens=one.output, ignore_eos=True)
        ticket = engine.submit(Request(prompts[i], params))
        reader = threading.Thread(target=read, args=(i, ticket))
        reader.start()
        readers.append(reader)
    for reader in readers:
        reader.join()
    return result.check()


def schedule_of(text: str) -> Base:
    """`NAME` or `NAME:option=value,…`. Raises AccelError."""
    name, _, rest = text.partition(":")
    axis, options = find_axes()["schedule"], {}
    for pair in filter(None, rest.split(",")):
        key, _, value = pair.partition("=")
        try:
            options[key] = float(value) if "." in value else int(value)
        except ValueError:
            raise AccelError(
                f"--schedule {text}: {key} is no number; write NAME:option=2"
            ) from None
    built: Base = axis.build(name, **options)
    return built


def picture(results: dict[str, Result], path: Path) -> None:
    """Times to the first token, and gaps, as cumulative curves."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
    for name, one in results.items():
        served = [(a, t) for a, t in zip(one.asked, one.tokens, strict=True) if t]
        firsts = np.sort([t[0] - a.arrival for a, t in served])
        gaps = np.sort(np.concatenate([np.diff(t) for _, t in served]))
        for axis, values in zip(axes, (firsts, gaps), strict=True):
            axis.plot(values, np.linspace(0, 1, values.size), label=name)
    for axis, what in zip(axes, ("time to the first token", "gap between tokens"), strict=True):
        axis.set(xlabel=f"{what}, seconds (simulated)", ylabel="part of all", xscale="log")
    axes[0].legend()
    figure.savefig(path)


def table(results: dict[str, Result]) -> str:
    """Milliseconds, and tokens per second."""
    lines = [f"{'':32}{'TTFT p50':>10}{'p99':>9}{'gap p50':>9}{'p99':>9}{'tokens/s':>10}  ms"]
    for name, one in results.items():
        f = one.figures
        times = [f[k] * 1e3 for k in ("ttft_median", "ttft_p99", "gap_median", "gap_p99")]
        shown = "".join(f"{t:>9.1f}" for t in times[1:])
        lines.append(f"{name:32}{times[0]:>10.1f}{shown}{f['tokens_per_second']:>10.1f}")
    return "\n".join(lines)


@app.command()
def fit(
    artifact: Path,
    out: Annotated[Path, typer.Option()] = Path("costs.json"),
    threads: Annotated[int | None, typer.Option()] = None,
) -> None:
    """Measure the calls of an artifact and fit their costs."""
    import accel

    with accel.load(artifact, threads=threads) as model:
        costs = measured(model)
    out.write_text(json.dumps(asdict(costs), indent=1) + "\n")
    typer.echo(out.read_text())


@app.command()
def run(
    costs: Annotated[Path, typer.Option(help="what `fit` wrote")],
    schedule: Annotated[list[str] | None, typer.Option(help="NAME or NAME:option=value,…")] = None,
    trace_file: Annotated[Path | None, typer.Option("--trace")] = None,
    rate: float = 20.0,
    count: int = 500,
    prompt: float = 64,
    output: float = 32,
    seed: int = 0,
    rows: int = 8,
    blocks: int = 256,
    cores: int = 2,
    apart: Annotated[
        bool, typer.Option(help="each process has a machine, not a part of one")
    ] = False,
    plot: Annotated[Path | None, typer.Option()] = None,
) -> None:
    """Simulate schedules over one trace."""
    told = Costs(**json.loads(costs.read_text()))
    asked = trace(trace_file) if trace_file else poisson(count, rate, prompt, output, seed)
    names = schedule or find_axes()["schedule"].names()
    results = {
        n: simulate(schedule_of(n), asked, Limits(rows, blocks), told, cores, apart) for n in names
    }
    typer.echo("simulated\n" + table(results))
    if plot:
        picture(results, plot)


@app.command()
def check(
    artifact: Path,
    rate: float = 1.5,
    count: int = 20,
    prompt: float = 60,
    output: float = 20,
    turns: int = 3,
    tolerance: Annotated[float, typer.Option(help="largest ratio of medians, either way")] = 1.6,
) -> None:
    """An engine for real, beside its simulation with costs that are fitted before and after each run. Exit code 1: the
    medians differ by more than the tolerance.
    """
    import accel

    ratios: dict[str, list[float]] = {}
    with accel.load(artifact) as model:
        room = model.facts.max_context
        blocks = model.facts.max_batch * -(-room // 16)
        policy = chosen(model.recipe)
        before = measured(model)
        for turn in range(turns):
            asked = [
                replace(
                    one, prompt=min(one.prompt, room // 2), output=min(one.output, room // 2 - 1)
                )
                for one in poisson(count, rate, prompt, output, seed=turn)
            ]
            got = real(model, asked)
            after = measured(model)
            mean = {k: (v + asdict(after)[k]) / 2 for k, v in asdict(before).items()}
            want = simulate(policy, asked, Limits(model.facts.max_batch, blocks), Costs(**mean))
            before = after
            typer.echo(table({f"{turn}: engine": got, f"{turn}: simulated": want}))
            for key in ("ttft_median", "gap_median", "tokens_per_second"):
                ratios.setdefault(key, []).append(got.figures[key] / want.figures[key])
    medians = {key: float(np.median(values)) for key, values in ratios.items()}
    typer.echo(
        "engine / simulated, median: " + json.dumps({k: round(v, 2) for k, v in medians.items()})
    )
    if any(max(v, 1 / v) > tolerance for v in medians.values()):
        raise typer.Exit(1)


@app.command("real")
def real_turns(
    artifacts: list[Path],
    trace_file: Annotated[Path | None, typer.Option("--trace")] = None,
    rate: float = 4.0,
    count: int = 24,
    prompt: float = 100,
    output: float = 24,
    turns: int = 3,
) -> None:
    """Serve one trace with the engine of each artifact, in turns. Ratios to the first artifact."""
    from contextlib import ExitStack

    import accel
    from accel.runtime.serve.phases import serving

    ratios: dict[tuple[str, str], list[float]] = {}
    with ExitStack() as stack:
        engines = {}
        for path in artifacts:
            model = stack.enter_context(accel.load(path))
            engine = stack.enter_context(serving(model, max_waiting=1000))
            engines[path.name] = (model, engine)
            served(model, engine, [Asked(0.0, 100, 8), Asked(0.0, 100, 8)])  # all is opened
        for turn in range(turns):
            asked = trace(trace_file) if trace_file else poisson(count, rate, prompt, output, turn)
            asked = [
                replace(one, prompt=min(one.prompt, 900), output=min(one.output, 900))
                for one in asked
            ]
            results = {name: served(*both, asked) for name, both in engines.items()}
            typer.echo(table(results))
            first, *others = results.items()
            for name, one in others:
                for key, value in one.figures.items():
                    if key.startswith(("ttft", "gap", "tokens")):
                        ratios.setdefault((name, key), []).append(value / first[1].figures[key])
    for (name, key), values in ratios.items():
        typer.echo(f"{name:32}{key:20}{np.median(values):6.2f}  ({np.round(values, 2).tolist()})")


if __name__ == "__main__":
    app()
