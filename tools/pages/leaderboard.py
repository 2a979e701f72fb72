"""Every recipe on the bundled model, at several budgets or bits: quality, recall, bytes, speed, memory.

    python tools/pages/leaderboard.py                        measure what is missing, then write the page
    python tools/pages/leaderboard.py --part quality         only what other work on the machine does not disturb
    python tools/pages/leaderboard.py --part quality --jobs 2  the same, two cases at a time
    python tools/pages/leaderboard.py --only snapkv --quick  one recipe, few samples
    python tools/pages/leaderboard.py --write                only write the page, from the results that are there

Recipes are found by folder, and their options by name (SWEEPS): a new method appears by itself. A case is
kept in a file of its own as soon as it is done; a run that is stopped goes on where it was. Writing the page also
writes all results beside its pictures, where another machine finds them (`results.jsonl`): it measures what is missing.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import tempfile
import time
import warnings
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "train"))
import leaderboard_measure as measure
from leaderboard_page import write
from reference_data import REFERENCE
from results import folder, weights
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import accel
from accel.compiler.assemble import EVICTION, OF_REQUESTS, assemble
from accel.compiler.build_options import BuildOptions
from accel.compiler.choose.builds import Builds
from accel.ir.axis import find_axes
from accel.ir.errors import AccelError
from accel.ir.recipe import Recipe, bundled

COMMITTED = Path("leaderboard/results.jsonl")  # beside the page
CONTEXT = 2048
# (axis, option) -> values, beside the recipe's own where a budget says nothing to prompts of 1000 tokens
SWEEPS: dict[tuple[str, str], tuple[Any, ...]] = {
    ("kv.budget", "tokens_kept"): (256, 128, 512, 64),
    ("prefill.prune", "tokens"): (256, 128, 512, 64),
    ("prefill.prune", "share"): (0.5, 0.3, 0.7),
    ("kv.select", "tokens_read"): (256, 128, 512, 64),
    ("prefill.sparse", "budget"): (256, 128, 512),
    ("depth", "speedup"): (2.0, 1.34),
    ("depth", "threshold"): (0.9, 0.5),
    ("depth", "share"): (0.25, 0.125),
}  # fmt: skip
# (axis, option or method) -> other options that fit the values, where the method has them
BESIDE: dict[tuple[str, str], dict[str, Any]] = {
    ("prefill.sparse", "budget"): {
        "segment": 128, "block": 16, "threshold": 0, "observe": 32, "columns": 64, "sinks": 16, "least": 64,
        "window": 64,
    },
    ("kv.budget", "pyramidkv"): {"beta": 4.0},  # else its least budget is below its window, and all are equal
    ("kv.select", "tokens_read"): {"floor": 0, "sinks": 16, "window": 32, "outliers": 4},
}  # fmt: skip
INSTEAD = ("compression_ratio",)  # options that would make a swept one count for nothing


@dataclass(frozen=True)
class Case:
    """A recipe, and the option that this case sets; "" and None: as the recipe is."""

    recipe: str
    option: str = ""
    value: Any = None
    tables: dict[str, dict[str, Any]] = field(default_factory=dict, compare=False)

    @property
    def name(self) -> str:
        return f"{self.recipe}@{self.value:g}" if self.option else self.recipe


def cases() -> list[Case]:
    """All of them; base first, which the others are compared with, then each recipe once, and its other values
    later: a run that is stopped early still knows of every recipe.
    """
    rows = [swept(name) for name in suited() if name != "base"]
    longest = max(map(len, rows))
    turns = [[row[turn] for row in rows if turn < len(row)] for turn in range(longest)]
    return [Case("base"), *(case for turn in turns for case in turn)]


def chosen() -> set[str]:
    """The names of the cases that stand for their recipes: each at the first of its values."""
    return {swept(name)[0].name for name in suited()}


def suited() -> list[str]:
    """The recipes of causal models, which the bundled one is, but for those that change no greedy request."""
    return [
        n for n in bundled() if not Recipe.load(n).tables.keys() <= OF_REQUESTS and not fills(n)
    ]


def fills(name: str) -> bool:
    """Whether a recipe is for models that fill masks."""
    loop = assemble(Recipe.load(name)).methods.get("loop")
    return loop is not None and (loop.masked_diffusion or loop.blocks)


def swept(name: str) -> list[Case]:
    """A recipe at the values of the first option that a sweep knows; else as it is."""
    recipe, axes = Recipe.load(name), find_axes()
    plan = assemble(recipe)
    tables = {axis: dict(table) for axis, table in plan.recipe.tables.items()}
    for (axis, option), values in SWEEPS.items():
        if axis not in tables:
            continue
        method = axes[axis].method(tables[axis]["use"])
        fields = {f.name: f.default for f in dataclasses.fields(method)}
        if option in fields:
            if axis == "depth":  # its own value, if it is among them, stands for a method
                values = tuple(sorted(values, key=lambda v: v != fields[option]))
            table = {n: v for n, v in tables[axis].items() if n not in INSTEAD}
            beside = {**BESIDE.get((axis, option), {}), **BESIDE.get((axis, table["use"]), {})}
            table |= {n: v for n, v in beside.items() if n in fields}
            return [Case(name, option, v, {**tables, axis: {**table, option: v}}) for v in values]
    return [Case(name, tables=tables)]


def build(builds: Builds, case: Case, out: Path) -> dict[str, Any]:
    """Write the artifact; seconds of passes and of lowering, and what weights lose."""
    plan = assemble(Recipe(case.recipe, tables=case.tables))
    with builds.build(plan, out) as built:
        told = built.report
        return {"grade": plan.grade, "seconds": told["seconds"], "weights": told.get("weights", {})}


def keep(path: Path, value: dict[str, Any]) -> None:
    """Whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(value, indent=1), encoding="utf-8")
    os.replace(part, path)


def results_of(own: Path, committed: Path) -> dict[str, dict[str, Any]]:
    """Results by the name of their case: parts of this folder, before those that the page was made of, if it was
    made of the weights that are bundled now.
    """
    lines = committed.read_text(encoding="utf-8").splitlines() if committed.is_file() else []
    each = [one for one in map(json.loads, lines) if one["weights"] == weights()]
    each += [json.loads(p.read_text(encoding="utf-8")) for p in sorted(own.glob("*.json"))]
    found: dict[str, dict[str, Any]] = {}
    for one in each:
        before = found.get(one["name"], {})
        found[one["name"]] = {n: v for n, v in before.items() if n != "refused"} | one
    return found


def missing(case: Case, results: dict[str, dict[str, Any]], parts: list[str]) -> list[str]:
    """Parts of a case's result that are not there; a case that was refused has all that it can have."""
    there = results.get(case.name, {})
    return [] if "refused" in there else [part for part in parts if part not in there]


def run(todo: dict[Case, list[str]], results: Path, amount: measure.Amount) -> None:
    """Measure these parts of cases; a case that is refused is a result too."""
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
    )  # fmt: skip
    with (
        Progress(*columns, disable=not sys.stderr.isatty()) as bar,
        tempfile.TemporaryDirectory() as place,
    ):
        task = bar.add_task("capture", total=len(todo))
        builds = Builds(REFERENCE, BuildOptions(max_context=CONTEXT))
        given = measure.windows(amount.windows)
        base = Path(place) / "base"
        build(builds, Case("base", tables=Recipe.load("base").tables), base)
        with accel.load(base, threads=measure.THREADS) as peer:
            odds = [measure.odds(peer, ids) for ids in given]
            for case, parts in todo.items():
                start = time.perf_counter()
                bar.update(task, description=case.name)
                found = _one(
                    case, builds, base if case.recipe == "base" else Path(place) / "case",
                    measure.Peer(peer, odds), given, amount, parts,
                    lambda part, name=case.name: bar.update(task, description=f"{name}: {part}"),
                )  # fmt: skip
                found["seconds"] = round(time.perf_counter() - start, 1)
                path = results / f"{case.name}.json"
                old = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
                keep(path, {**old, **found})
                bar.advance(task)
                if bar.disable:
                    print(
                        f"{case.name}: {found['seconds']} s {found.get('refused', '')}", flush=True
                    )


def run_together(
    todo: dict[Case, list[str]], results: Path, amount: measure.Amount, jobs: int
) -> None:
    """The same in so many processes, each with every so many-th case; KeyboardInterrupt ends all."""
    shares = [dict(list(todo.items())[first::jobs]) for first in range(jobs)]
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        for done in [pool.submit(run, share, results, amount) for share in shares if share]:
            done.result()


def _one(
    case: Case, builds: Builds, out: Path, peer: measure.Peer, given: Any, amount: Any, parts: Any,
    tell: Any,
) -> dict[str, Any]:  # fmt: skip
    """The result of one case."""
    about = {
        "name": case.name, "recipe": case.recipe, "option": case.option, "value": case.value,
        "tables": case.tables, "samples": dataclasses.asdict(amount),
        "family": _family(case), "weights": weights(),
    }  # fmt: skip
    try:
        tell("build")
        built = {"grade": "lossless"} if case.recipe == "base" else build(builds, case, out)
        with accel.load(out, threads=measure.THREADS) as model:
            own = None if case.recipe == "base" else peer
            return {
                **about,
                "build": built,
                **measure.measured(model, own, given, amount, parts, tell),
            }
    except AccelError as error:
        return {**about, "refused": " ".join(str(error).split())}


def _family(case: Case) -> str:
    """The axes that a case changes, eviction as one."""
    found = dict.fromkeys("kv" if a in EVICTION else a for a in case.tables if a != "loop")
    return " + ".join(found) or "base"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", action="append", metavar="RECIPE", help="may be repeated")
    parser.add_argument("--quick", action="store_true", help="few samples: a look, not a result")
    parser.add_argument(
        "--part", action="append", choices=measure.PARTS, help="may be repeated; default all"
    )
    parser.add_argument("--jobs", type=int, default=1, help="cases at a time, of --part quality")
    parser.add_argument("--again", action="store_true", help="measure what was measured before too")
    parser.add_argument("--write", action="store_true", help="only write the page")
    parser.add_argument("--windows", type=int, default=6)
    parser.add_argument("--prompts", type=int, default=2, help="of each task, length and depth")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--results", type=Path, default=folder("leaderboard"))
    parser.add_argument("--docs", type=Path, default=Path("docs/figures"))
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    amount = measure.Amount(options.windows, options.prompts, options.rounds)
    if options.quick:
        amount = measure.Amount(1, 1, 1)
    if not options.write:
        wanted = cases()
        if options.only:
            known = {c.recipe for c in wanted}
            if wrong := [n for n in options.only if n not in known]:
                parser.error(f"no recipe {wrong[0]!r}; there are {', '.join(sorted(known))}")
            wanted = [c for c in wanted if c.recipe in (*options.only, "base")]
        there = results_of(options.results, options.docs / COMMITTED)
        parts = options.part or list(measure.PARTS)
        if options.jobs < 1 or (options.jobs > 1 and parts != ["quality"]):
            parser.error(f"--jobs is {options.jobs}; give 1, or more with --part quality alone")
        left = {c: parts if options.again else missing(c, there, parts) for c in wanted}
        if todo := {c: some for c, some in left.items() if some}:
            if options.jobs > 1:
                run_together(todo, options.results, amount, options.jobs)
            else:
                run(todo, options.results, amount)
    results = results_of(options.results, options.docs / COMMITTED)
    found = [results[name] for name in sorted(results)]
    if not any(r["name"] == "base" and "quality" in r for r in found):
        parser.error(f"{options.results} holds no result of base; run without --write")
    write(options.docs, found, chosen())
    lines = [json.dumps(one, separators=(",", ":")) for one in found]
    (options.docs / COMMITTED).write_text("\n".join([*lines, ""]), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
