"""What conditions around layers cost, and what leaving half of the layers out gives, in decode steps.

    python tools/bench/bench_depth.py CHECKPOINT [--recipe int4] [--context 512] [--threads 1] [--kernels native]

Builds the recipe without and with `unified-skip` (a nested and a propagating cache) and `by-branch`, and lets
them take turns of a few steps in one process: the plain graph, all layers on, every second one, and one alone,
from which the head's time follows; of branches also every second attention, and every second MLP. Ratios are
medians over the rounds, with their quartiles. With one thread its own processor time counts, which others on the
machine disturb less.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median, quantiles
from typing import Annotated, Any

import numpy as np
import typer

import accel
from accel.runtime.session.session import Session

CACHES = ("nested", "propagate")
BRANCHES = "branches"
BUILDS: dict[str, dict[str, str]] = {
    **{cache: {"use": "unified-skip", "cache": cache} for cache in CACHES},
    BRANCHES: {"use": "by-branch"},
}
Clock = Callable[[], float]
QUIET = 0.25  # seconds in which threads of the session before stop spinning


def main(
    checkpoint: Path,
    recipe: str = "int4",
    context: int = 512,
    threads: int = 1,
    kernels: str = "native",
    rounds: int = 25,
    steps: Annotated[int, typer.Option(help="of a turn; the least counts")] = 12,
    keep: Annotated[Path | None, typer.Option(help="builds are kept here, and taken from")] = None,
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        models = {}
        for name, method in {"plain": None, **BUILDS}.items():
            out = (keep or Path(folder)) / f"{checkpoint.name}-{recipe}-{name}"
            if not out.exists():
                depth = [{"depth": method}] if method else []
                room = context + 256
                accel.optimize(
                    checkpoint, [recipe, *depth], max_context=room, out=out, verify=False
                ).close()
            models[name] = accel.load(out, threads=threads, kernels=kernels)
        times = measure(models, context, rounds, steps, threads)
        for model in models.values():
            model.close()
    print(table(times, layers := len(models["nested"].facts.depth.plan)))
    print(branches(times, layers))


def measure(
    models: dict[Any, Any], context: int, rounds: int, steps: int, threads: int
) -> dict[str, list[float]]:
    """By what runs, seconds of a step in each round."""
    clock = time.thread_time if threads == 1 else time.perf_counter
    layers = models["nested"].facts.num_layers
    plans = {
        "all": np.ones(layers, bool),
        "half": np.arange(layers) % 2 == 0,
        "one": np.arange(layers) == 0,
    }
    tokens = np.random.default_rng(0).integers(0, models["plain"].facts.vocab_size, (1, context))
    turns: dict[str, tuple[Session, dict[str, Any]]] = {"plain": (models["plain"].session(), {})}
    for build in BUILDS:
        for name, plan in plans.items():
            turns[f"{build} {name}"] = models[build].session(), {"run_layers": plan}
    for kind, other in (("run_attn", "run_mlp"), ("run_mlp", "run_attn")):
        off = {kind: plans["half"], other: plans["all"]}
        turns[f"{BRANCHES} {kind}"] = models[BRANCHES].session(), off
    for session, _ in turns.values():
        session.run(tokens, last_only=True)
    found: dict[str, list[float]] = {name: [] for name in turns}
    order = list(turns)
    for turn in range(rounds):
        first = turn % len(order)
        for name in order[first:] + order[:first]:
            time.sleep(QUIET * (threads > 1))
            found[name].append(seconds(*turns[name], tokens[:, :1], context, steps, clock))
    for session, _ in turns.values():
        session.close()
    return found


def seconds(
    session: Session, plan: dict[str, Any], token: Any, context: int, steps: int, clock: Clock
) -> float:
    """The least of some steps after `context` tokens."""
    session.rewind(context)
    taken = []
    for _ in range(steps):
        start = clock()
        session.run(token, **plan)
        taken.append(clock() - start)
    return min(taken)


def table(times: dict[str, list[float]], layers: int) -> str:
    plain = times["plain"]
    lines = [
        "| cache | plain graph, ms | all layers on, ms | of the plain graph | half on, ms | times faster "
        "| head excluded |",
        "|---|---|---|---|---|---|---|",
    ]
    on, one = times["nested all"], times["nested one"]  # a layer that is off takes no time there
    head = [o - (a - o) / (layers - 1) for a, o in zip(on, one, strict=True)]
    for cache in CACHES:
        on, half = times[f"{cache} all"], times[f"{cache} half"]
        cells = [
            cache,
            ms(plain),
            ms(on),
            ratio(on, plain),
            ms(half),
            ratio(plain, half),
            ratio(less(plain, head), less(half, head)),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def branches(times: dict[str, list[float]], layers: int) -> str:
    """What conditions on branches cost, and what leaving them out gives."""
    plain, on, half = times["plain"], times[f"{BRANCHES} all"], times[f"{BRANCHES} half"]
    attention, mlp = times[f"{BRANCHES} run_attn"], times[f"{BRANCHES} run_mlp"]
    one, whole = times[f"{BRANCHES} one"], times["nested one"]
    left = [(a - b) / (2 * (layers - 1)) * 1e6 for a, b in zip(one, whole, strict=True)]
    return "\n".join(
        [
            "| all branches on, of the plain graph | half of the layers off | half of the attentions off, times faster "
            "| half of the MLPs off | a branch that is off, µs |",
            "|---|---|---|---|---|",
            f"| {ratio(on, plain)} | {ratio(plain, half)} | {ratio(plain, attention)} | {ratio(plain, mlp)} "
            f"| {median(left):.1f} |",
        ]
    )


def less(a: list[float], b: list[float]) -> list[float]:
    return [x - y for x, y in zip(a, b, strict=True)]


def ms(times: list[float]) -> str:
    return f"{1e3 * median(times):.2f}"


def ratio(a: list[float], b: list[float]) -> str:
    """Median of the rounds' ratios, and their quartiles."""
    all_ = [x / y for x, y in zip(a, b, strict=True)]
    low, middle, high = quantiles(all_, n=4)
    return f"**{middle:.3f}** ({low:.3f}..{high:.3f})"


if __name__ == "__main__":
    typer.run(main)
