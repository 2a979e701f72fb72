"""How much longer than `base` a recipe builds, and where the time goes: a table for docs/figures/details/builds.md.

    python tools/bench/bench_build.py [RECIPE …] [--rounds N]
    python tools/bench/bench_build.py base int4 --model smollm2.gguf --model ./smollm2   real models, in fresh processes

A model given is built by the command line with and without the check, alone and beside a program that keeps a core
busy: elapsed and processor seconds, the peak that the system counts as resident, and the parts of the build.

Builds of the bundled model, verified, alternating with base; processor seconds of this process, which other
processes disturb less than elapsed ones. Reading and capturing the model are the same whatever the recipe: they
are measured once and counted in every build.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import scale
import turns

sys.path.extend(str(Path(__file__).resolve().parents[1] / folder) for folder in ("pages", "train"))
from leaderboard import suited
from reference_data import REFERENCE

from accel.compiler.build_options import BuildOptions
from accel.compiler.load.source import open_source
from accel.compiler.optimize import build_captured
from accel.ir.capture.capture import capture
from accel.ir.program import Program

SLOW = ("int4-gptq", "int4-awq")  # which run the model over a text: what they do is not building


class Clock:
    """Processor seconds by part and pass of a build, which its progress names as they begin."""

    def __init__(self) -> None:
        self.parts: dict[str, float] = {}
        self._name, self._start = "", time.process_time()

    def __call__(self, name: str, _: float) -> None:
        now = time.process_time()
        if self._name:
            self.parts[self._name] = self.parts.get(self._name, 0.0) + now - self._start
        self._name, self._start = name, now


def built(program: Program, recipe: str) -> dict[str, float]:
    """Processor seconds of the parts of a build after the capture."""
    clock, tokenizer = Clock(), open_source(REFERENCE).tokenizer
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        build_captured(program, recipe, BuildOptions(), tokenizer, out, clock).close()
    clock("", 1.0)
    return clock.parts


def row(recipe: str, fixed: float, pairs: list[tuple[dict[str, float], dict[str, float]]]) -> None:
    """Ratio of whole builds, and the parts that grew most."""
    ratios = [(fixed + sum(b.values())) / (fixed + sum(a.values())) for a, b in pairs]
    base, own = (
        {
            k: statistics.mean(p[i].get(k, 0.0) for p in pairs)
            for k in {**pairs[0][0], **pairs[0][1]}
        }
        for i in (0, 1)
    )
    more = sorted(((own[k] - base[k], k) for k in own), reverse=True)[:3]
    told = ", ".join(f"{k} {s:+.1f}" for s, k in more if s > 0.2)
    total = fixed + statistics.mean(sum(b.values()) for _, b in pairs)
    turns.row(recipe, f"{total:.1f}", turns.median_range(ratios), told)


@contextmanager
def neighbours(count: int) -> Iterator[None]:
    """So many programs that keep a core busy each."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for program in busy:
            program.kill()
            program.wait()


def real(models: list[Path], recipes: list[str]) -> None:
    """A row for each build of a model by the command line."""
    names = (
        "model",
        "recipe",
        "check",
        "busy neighbours",
        "elapsed s",
        "CPU s",
        "peak",
        "parts, s",
    )
    turns.head(*names)
    for model, recipe, check, busy in itertools.product(
        models, recipes, ("--verify", "--no-verify"), (0, 1)
    ):
        with tempfile.TemporaryDirectory() as folder, neighbours(busy):
            start = time.perf_counter()
            peak, _, cpu, report = scale.build(model, Path(folder) / "out", recipe, check)
            elapsed = time.perf_counter() - start
        parts = ", ".join(f"{n} {s:.1f}" for n, s in report["seconds"].items() if n != "total")
        spent = (f"{elapsed:.1f}", f"{cpu:.1f}", f"{peak / 1e6:.0f} MB")
        turns.row(model.name, recipe, check.removeprefix("--"), busy, *spent, parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipes", nargs="*")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--model", type=Path, action="append", default=[], help="may be repeated")
    given: Any = parser.parse_args()
    if given.model:
        real(given.model, given.recipes or ["base"])
        return
    warnings.filterwarnings("ignore")
    start = time.process_time()
    loaded = open_source(REFERENCE).load()
    program = capture(loaded.model, max_context=2048, stored=loaded.stored)
    fixed = time.process_time() - start
    built(program, "base")  # warms up
    print(f"reading and capturing: {fixed:.1f} s\n")
    turns.head("recipe", "CPU seconds", "of base", "parts that take longer, s")
    for recipe in given.recipes or [n for n in suited() if n not in (*SLOW, "base")]:
        pairs = [(built(program, "base"), built(program, recipe)) for _ in range(given.rounds)]
        row(recipe, fixed, pairs)


if __name__ == "__main__":
    main()
