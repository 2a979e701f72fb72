"""How much longer than `base` a recipe builds, and where the time goes: a table for docs/figures/details/builds.md.

    python tools/bench/bench_build.py [RECIPE …] [--rounds N]

Builds of the bundled model, verified, alternating with base; processor seconds of this process, which other
processes disturb less than elapsed ones. Reading and capturing the model are the same whatever the recipe: they
are measured once and counted in every build.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

sys.path.extend(str(Path(__file__).resolve().parents[1] / folder) for folder in ("pages", "train"))
from leaderboard import suited
from reference_data import REFERENCE

from accel.compiler.build_options import BuildOptions
from accel.compiler.load.checkpoint import load_model
from accel.compiler.load.tokenizer import read_tokenizer
from accel.compiler.optimize import build_captured
from accel.ir.capture.capture import capture
from accel.ir.program import Program

SLOW = ("int4-gptq", "int4-awq")  # which run the model over a text: what they do is not building


class Clock:
    """Processor seconds by part of a build, told by its progress: parts when they begin, passes when they end."""

    def __init__(self) -> None:
        self.parts: dict[str, float] = {}
        self._name, self._start = "", time.process_time()

    def __call__(self, name: str, _: float) -> None:
        now = time.process_time()
        part = name if name[:1].isupper() else self._name
        if part:
            self.parts[part] = self.parts.get(part, 0.0) + now - self._start
        self._name, self._start = name, now


def built(program: Program, recipe: str) -> dict[str, float]:
    """Processor seconds of the parts of a build after the capture."""
    clock, tokenizer = Clock(), read_tokenizer(None, REFERENCE)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        build_captured(program, recipe, BuildOptions(), tokenizer, out, clock).close()
    clock("", 1.0)
    return clock.parts


def row(recipe: str, fixed: float, pairs: list[tuple[dict[str, float], dict[str, float]]]) -> str:
    """Ratio of whole builds, and the parts that grew most."""
    ratios = sorted((fixed + sum(b.values())) / (fixed + sum(a.values())) for a, b in pairs)
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
    return f"| {recipe} | {total:.1f} | {statistics.median(ratios):.2f} ({ratios[0]:.2f}..{ratios[-1]:.2f}) | {told} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipes", nargs="*")
    parser.add_argument("--rounds", type=int, default=2)
    given: Any = parser.parse_args()
    warnings.filterwarnings("ignore")
    start = time.process_time()
    loaded = load_model(REFERENCE)
    program = capture(loaded.model, max_context=2048, stored=loaded.stored)
    fixed = time.process_time() - start
    built(program, "base")  # warms up
    print(f"reading and capturing: {fixed:.1f} s\n")
    print("| recipe | CPU seconds | of base | parts that take longer, s |\n|---|---|---|---|")
    for recipe in given.recipes or [n for n in suited() if n not in (*SLOW, "base")]:
        pairs = [(built(program, "base"), built(program, recipe)) for _ in range(given.rounds)]
        print(row(recipe, fixed, pairs), flush=True)


if __name__ == "__main__":
    main()
