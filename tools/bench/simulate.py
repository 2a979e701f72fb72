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

import json
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from simulation import Asked, Costs, Result, poisson, simulate, trace
from simulation_costs import measured

import accel
from accel.ir.axis import find_axes
from accel.ir.errors import AccelError
from accel.runtime.decode.sampling_params import SamplingParams
from accel.runtime.schedule import Base, Limits, chosen
from accel.runtime.serve.engine import Request
from accel.runtime.serve.phases import serving

app = typer.Typer(add_completion=False, no_args_is_help=True)


def real(model: Any, asked: Sequence[Asked], seed: int = 0) -> Result:
    """The same trace, served by an engine over the model, each request at its time."""
    with serving(model, max_waiting=len(asked)) as engine:
        return served(model, engine, asked, seed)


def served(model: Any, engine: Any, asked: Sequence[Asked], seed: int = 0) -> Result:
    """A trace, by an engine that is open."""
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
