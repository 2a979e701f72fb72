"""How the engine serves every recipe: in shared calls, in turns, or not; a page says which.

    python tools/pages/served.py [--only NAME …]       what was not asked yet; a result is a file of build/served
    python tools/pages/served.py --page docs/figures   write served.md of the results that there are

A recipe is built on the bundled model, or on the bundled diffusion model where it asks for one. The engine says how
requests share it (`Engine.how`), two requests at once are served, and their tokens are compared with `generate`'s.
"""

from __future__ import annotations

import json
import time
import traceback
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import results
import typer
from rich.progress import track

import accel
from accel.compiler.assemble import assemble
from accel.compiler.build_options import BuildOptions
from accel.compiler.choose.builds import Builds
from accel.ir.errors import AccelError
from accel.ir.recipe import Recipe, groups
from accel.runtime.serve.engine import Request
from accel.runtime.serve.phases import serving

MODEL = Path(str(files("accel.reference")))
MODELS = {
    name: MODEL / name for name in ("diffusion", "blocks")
}  # by the group of a recipe; else the bundled model
RESULTS = results.folder("served")
PROMPTS = ("def quicksort(items):\n    if len(items)", "import os\nimport")
TOKENS = 12
NOT_BUILT, NOT_SERVED, FAILED = "not built", "not served", "failed"
STATES = {
    "shared": "requests share calls",
    "apart": "processes of several kinds share them",
    "turns": "requests take turns, each in a session of its own",
    NOT_SERVED: "the engine refuses it by name",
    NOT_BUILT: "the bundled model cannot have it, and the build says why",
    FAILED: "a fault",
}


@dataclass(frozen=True)
class Served:
    """Of a recipe. `how`: one of STATES; `prompts`: whole or in chunks, where requests share calls; `why`: it is not so
    else; `equal`: of the requests, those that got the tokens of `generate`.
    """

    recipe: str
    group: str
    how: str
    prompts: str = ""
    why: str = ""
    equal: int = 0
    seconds: float = 0.0

    def __post_init__(self) -> None:
        if self.how not in STATES:
            raise ValueError(f"{self.recipe}: {self.how!r} is none of {', '.join(STATES)}")


def told(how: str) -> tuple[str, str, str]:
    """What `Engine.how` says: one of STATES, how prompts run, and why."""
    sentence = how.rpartition(" (")[0]
    if sentence.startswith("requests share calls; prompts run "):
        return "shared", sentence.rpartition("prompts run ")[2], ""
    if sentence.startswith("processes: "):
        return "apart", "", sentence
    return "turns", "", sentence.partition(": ")[2]


@cache
def builds(model: Path) -> Builds:
    """The builds of a model, which is captured once."""
    return Builds(model, BuildOptions(max_batch=len(PROMPTS)))


def ask(recipe: str, group: str, folder: Path) -> Served:
    """Build it in an empty folder, serve two requests at once, and compare."""
    start = time.monotonic()
    try:
        plan = assemble(Recipe.load(recipe))
        model = builds(MODELS.get(group, MODEL)).build(plan, folder / "artifact")
    except AccelError as error:
        return Served(recipe, group, NOT_BUILT, why=str(error), seconds=time.monotonic() - start)
    with model:
        params = accel.SamplingParams(max_tokens=TOKENS, ignore_eos=True, temperature=0)
        want = [model.generate(p, sampling_params=params).tokens[0] for p in PROMPTS]
        try:
            with serving(model) as engine:
                how, prompts, why = told(engine.how)
                tickets = [engine.submit(Request(prompt, params)) for prompt in PROMPTS]
                got = [[e.token for e in ticket if e.token >= 0] for ticket in tickets]
        except AccelError as error:
            return Served(
                recipe, group, NOT_SERVED, why=str(error), seconds=time.monotonic() - start
            )
    equal = sum(a == b for a, b in zip(got, want, strict=True))
    return Served(recipe, group, how, prompts, why, equal, time.monotonic() - start)


def page(found: Sequence[Served], names: Sequence[str]) -> str:
    """The text of served.md. `names`: of the recipes that there should be results of."""
    by = defaultdict[tuple[str, str, str], list[Served]](list)
    for one in found:
        by[one.how, one.prompts, reason(one)].append(one)
    served = [one for one in found if one.how in ("shared", "apart", "turns")]
    equal = sum(one.equal for one in served)
    lines = [
        "# How recipes are served",
        "",
        f"Each of the {len(names)} recipes on the bundled model (those of masked diffusion on the bundled diffusion "
        "model), as [the engine](../internals/serving.md) says it: `Engine.how`. Two requests at once were served with "
        f"each, of {TOKENS} greedy tokens; {equal} of {2 * len(served)} got the tokens of `generate`, to the last one.",
        "",
        "`python tools/pages/served.py` asks again; `--page docs/figures` writes this page.",
        "",
        "| how | recipes |",
        "|---|---|",
    ]
    counts = [(how, sum(one.how == how for one in found)) for how in STATES]
    lines += [f"| {STATES[how]} | {count} |" for how, count in counts if count]
    for how, text in STATES.items():
        rows = {key: ones for key, ones in by.items() if key[0] == how}
        if not rows:
            continue
        head = {"shared": "prompts run", "apart": "how"}.get(how, "why")
        lines += ["", f"## {text[0].upper()}{text[1:]}", "", f"| {head} | recipes |", "|---|---|"]
        for (_, prompts, why), ones in sorted(rows.items(), key=lambda row: -len(row[1])):
            those = ", ".join(f"`{one.recipe}`" for one in sorted(ones, key=lambda o: o.recipe))
            lines.append(f"| {(prompts or why).replace('|', chr(92) + '|')} | {those} |")
    other = [one.recipe for one in served if one.equal < len(PROMPTS)]
    if other:
        lines += ["", "Tokens that differ from `generate`'s: " + ", ".join(f"`{n}`" for n in other)]
    if missing := sorted(set(names) - {one.recipe for one in found}):
        lines += ["", "Not asked: " + ", ".join(f"`{name}`" for name in missing) + "."]
    return "\n".join(lines) + "\n"


def reason(one: Served) -> str:
    """Why, in a line."""
    return " ".join(one.why.split())


def main(
    only: Annotated[list[str] | None, typer.Option(help="Recipes; by default all.")] = None,
    to: Annotated[
        Path | None, typer.Option("--page", help="The folder of the page; nothing is asked.")
    ] = None,
) -> None:
    """Ask what was not asked yet, or write the page."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    every = {name: group.name for group in groups() for name in group.recipes}
    if to is not None:
        kept = [json.loads(file.read_text()) for file in sorted(RESULTS.glob("*.json"))]
        found = [Served(**one) for one in kept if one["recipe"] in every]
        (to / "served.md").write_text(page(found, list(every)), encoding="utf-8")
        return
    for name in track(only or list(every)):
        file = RESULTS / f"{name}.json"
        if file.exists() and not only:
            continue
        try:
            with TemporaryDirectory() as folder:
                one = ask(name, every[name], Path(folder))
        except Exception as error:
            traceback.print_exc()
            one = Served(name, every[name], FAILED, why=f"{type(error).__name__}: {error}")
        part = file.with_suffix(".part")  # a result is there whole or not at all
        part.write_text(json.dumps(asdict(one)))
        part.rename(file)


if __name__ == "__main__":
    typer.run(main)
