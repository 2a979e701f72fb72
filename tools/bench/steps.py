"""Calls of one and several tokens, two artifacts in turns: what a recipe does to a step.

    python tools/bench/steps.py A B --contexts 512,4096 --tokens 1,4,8
    python tools/bench/steps.py A B --attention        CPU seconds of one thread in attention alone (the probes)
    python tools/bench/steps.py A B --kernels native,gqa        a variant of either

A ratio is the median of the rounds', with the tenth from either end; above 1 B is faster.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np
import typer
from turns import head, in_turns, ratios, row

import accel
from accel.runtime.backends.onnx import tune
from accel.runtime.backends.onnx.open import open_session


def main(
    a: Path,
    b: Path,
    contexts: str = "512,4096",
    tokens: str = "1,4,8",
    rounds: int = 41,
    threads: int = 2,
    kernels: Annotated[
        str, typer.Option(help="a variant of both, or of each, as native,gqa")
    ] = "native",
    attention: Annotated[bool, typer.Option(help="attention alone, by CPU time")] = False,
) -> None:
    """Print a row for each context and number of tokens."""
    head("context", "tokens", "A, ms", "B, ms", "A / B")
    with ExitStack() as stack:
        for context in map(int, contexts.split(",")):
            make = _attention if attention else _steps
            for width, pair in make(stack, (a, b), context, tokens, threads, kernels):
                clock = time.process_time if attention else time.perf_counter
                _row(context, width, pair, rounds, clock)


def _each(kernels: str) -> list[str]:
    """The variant of either artifact."""
    names = kernels.split(",")
    return names if len(names) > 1 else names * 2


def _steps(stack: ExitStack, paths, context, tokens, threads, kernels):
    """The whole step, after a prompt that is run once."""
    rng = np.random.default_rng(0)
    prompt, more = rng.integers(0, 999, (1, context)), rng.integers(0, 999, (1, 64))
    sessions = []
    for path, variant in zip(paths, _each(kernels), strict=True):
        model = stack.enter_context(accel.load(path, kernels=variant, threads=threads))
        sessions.append(stack.enter_context(model.session()))
        sessions[-1].run(prompt, last_only=True)
    for width in map(int, tokens.split(",")):

        def call(session, width=width):
            session.run(more[:, :width])
            return lambda: session.rewind(context)

        yield width, [lambda s=s: call(s) for s in sessions]


def _attention(stack, paths, context, tokens, threads, kernels):
    """The probes of attention, as the choice of a variant runs them."""
    probes = [
        open_session(p / f"probe.{variant}.onnx", 1, False)
        for p, variant in zip(paths, _each(kernels), strict=True)
    ]
    for width in map(int, tokens.split(",")):
        bound = [(s, tune._binding(s, width, context, context)) for s in probes]
        yield width, [lambda s=s, x=x: s.run_with_iobinding(x) for s, x in bound]


def _row(
    context: int, width: int, pair: list[Callable], rounds: int, clock: Callable[[], float]
) -> None:
    def least(call: Callable[[], Any]) -> float:
        """The least of three turns; what a call gives makes it undone."""
        best = []
        for _ in range(3):
            start = clock()
            after = call()
            best.append(clock() - start)
            if after is not None:
                after()
        return min(best)

    first, second = pair
    a, b = in_turns({"a": lambda: least(first), "b": lambda: least(second)}, rounds).values()
    found = ratios(a, b)
    spread = f"({found[rounds // 10]:.2f}..{found[-1 - rounds // 10]:.2f})"
    spent = (f"{1e3 * median(each):.2f}" for each in (a, b))
    row(context, width, *spent, f"{median(found):.2f} {spread}")


if __name__ == "__main__":
    typer.run(main)
