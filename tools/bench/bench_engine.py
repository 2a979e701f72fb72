"""What an engine spends beside the model's calls, and what a row costs that joins: JSON on stdout.

    python tools/bench/bench_engine.py ARTIFACT [--rows 16] [--prompt 64] [--new 64]

`iterations`: seconds of those in which all rows decode and no prompt runs, and the shares of the schedule's plan and
of the session's calls. `joins`: seconds (median) in which a row joins a session of so many, and the bytes of its state.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np
import typer

import accel
from accel.runtime.model.compiled import CompiledModel
from accel.runtime.schedule import Limits, Plan, State
from accel.runtime.serve.engine import Engine, Request
from accel.runtime.session.session import Session

AGAIN = 9  # times that a row joins
ROWS = (1, 2, 4, 8, 15)  # that a session has when one joins


class Clock:
    """Seconds in calls, by name, since the last `take`."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = {}

    def of(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """The call, timed."""

        def timed(*args: Any, **more: Any) -> Any:
            start = time.perf_counter()
            try:
                return call(*args, **more)
            finally:
                self.spent[name] = self.spent.get(name, 0.0) + time.perf_counter() - start

        return timed

    def take(self) -> dict[str, float]:
        found, self.spent = self.spent, {}
        return found


class Timed:
    """A schedule whose plans are timed; `last`: the newest."""

    def __init__(self, inner: Any, clock: Clock):
        self.chunks, self.reads_hits = inner.chunks, inner.reads_hits
        self._plan = clock.of("plan", inner.plan)
        self.last = Plan()

    def plan(self, state: State, limits: Limits) -> Plan:
        self.last = self._plan(state, limits)
        return self.last


def iterations(model: CompiledModel, rows: int, prompt: int, new: int) -> dict[str, float]:
    """Of iterations in which all rows decode."""
    clock, found = Clock(), list[dict[str, float]]()
    draw = np.random.default_rng(0)
    params = accel.SamplingParams(max_tokens=new, ignore_eos=True, temperature=0)
    call = Session.run
    Session.run = clock.of("call", call)  # type: ignore[method-assign]
    try:
        with Engine(model) as engine:
            schedule = engine._batcher.schedule = Timed(engine._batcher.schedule, clock)  # type: ignore[assignment]
            whole = clock.of("all", engine._batcher.iterate)

            def iteration() -> None:
                schedule.last = Plan()
                whole()
                spent = clock.take()
                if len(schedule.last.decodes) == rows and not schedule.last.chunks:
                    found.append(spent)

            engine._batcher.iterate = iteration  # type: ignore[method-assign]
            prompts = draw.integers(3, model.facts.vocab_size, (rows, prompt))
            with engine._queue.changed:  # iterations begin when all are there
                tickets = [engine.submit(Request(one, params)) for one in prompts]
            for ticket in tickets:
                list(ticket)
    finally:
        Session.run = call  # type: ignore[method-assign]
    return {
        "count": len(found),
        "seconds": median(one["all"] for one in found),
        "plan": median(one["plan"] / one["all"] for one in found),
        "calls": median(one["call"] / one["all"] for one in found),
    }


def joins(model: CompiledModel, prompt: int) -> list[dict[str, float]]:
    """Of sessions with more and more rows."""
    draw, found = np.random.default_rng(0), []
    for rows in (n for n in ROWS if n < model.facts.max_batch):
        seconds, size = [], 0.0
        with model.session(rows) as session:
            session.prompt(draw.integers(3, model.facts.vocab_size, (rows, prompt)))
            for _ in range(AGAIN):
                with model.session(1) as other:
                    other.prompt(draw.integers(3, model.facts.vocab_size, (1, prompt)))
                    size = float(other.stats["kv_bytes"])
                    start = time.perf_counter()
                    session.join(other)
                    seconds.append(time.perf_counter() - start)
                session.leave(rows)
        found.append({"rows": rows, "seconds": median(seconds[1:]), "bytes": size})
    return found


def main(
    artifact: Path,
    rows: Annotated[int, typer.Option(min=1)] = 16,
    prompt: Annotated[int, typer.Option(min=1)] = 64,
    new: Annotated[int, typer.Option(min=2)] = 64,
    threads: int = 2,
) -> None:
    """Print both."""
    with accel.load(artifact, threads=threads) as model:
        told = {"iterations": iterations(model, rows, prompt, new), "joins": joins(model, prompt)}
    print(json.dumps(told))


if __name__ == "__main__":
    typer.run(main)
