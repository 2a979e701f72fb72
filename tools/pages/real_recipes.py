"""Every causal recipe on a real model: built with the default checks, and what its artifact answers.

    python tools/pages/real_recipes.py MODEL                 measure what is missing, then write the page
    python tools/pages/real_recipes.py MODEL --only snapkv   some
    python tools/pages/real_recipes.py MODEL --train         tables first, for what lacked one
    python tools/pages/real_recipes.py MODEL --only snapkv --set kv.score.window=16     with another option: printed,
                                                             not on the page
    python tools/pages/real_recipes.py MODEL --only snapkv --needles 20 --budget 232 --budget 116
                                                             only what they find of more prompts: printed
    python tools/pages/real_recipes.py --write               only write the page

MODEL is captured once. Each recipe is built as `accel-compile build` does, at the first value that the leaderboard
gives its budget (`snapkv@256`), and its artifact is opened: KL from base after a prompt of prose and of code, pass keys
and numbers in some 1000 tokens, and whether texts are base's. A recipe that is refused is a result too. A result is
kept in a file of its own as soon as it is there; a run that is stopped goes on where it was. Prose and code are
Python's own: its reference, and `heapq` and `argparse`.
"""

from __future__ import annotations

import argparse
import heapq
import inspect
import json
import os
import platform
import shutil
import sys
import tempfile
import time
import tomllib
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import typer
from leaderboard import Case, keep, suited, swept
from needles import SENTENCES, key_prompts, number_prompts, right
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import accel
from accel.compiler.build_options import BuildOptions
from accel.compiler.load.source import open_source
from accel.compiler.optimize import build_captured
from accel.compiler.quality.divergence import Odds, along, divergence
from accel.ir.capture.capture import capture
from accel.ir.errors import AccelError, InputError
from accel.ir.program import Program
from accel.ir.recipe import Recipe
from accel.runtime.inputs.text import Tokenizer
from accel.runtime.model.compiled import CompiledModel

ROOT = Path(__file__).resolve().parents[2]
CONTEXT = 2048
PROMPT, STEPS = 1024, 64  # tokens that are read, and then decoded along the text
HIDDEN = 3  # prompts of each kind that hide something
CHATS = (
    "Why is the sky blue? Answer in two sentences.",
    "Write a Python function that merges two sorted lists.",
)
NEW = 32  # tokens of an answer
LACKS = "accel-compile train"  # what an error says where a part is missing


@dataclass(frozen=True)
class Base:
    """What the others are compared with."""

    odds: dict[str, Odds]
    texts: list[list[int]]


def windows(model: CompiledModel) -> dict[str, npt.NDArray[Any]]:
    """PROMPT + STEPS tokens of each kind of text."""
    from pydoc_data.topics import topics

    assert model.tokenizer is not None
    texts = {
        "prose": topics["objects"] + topics["types"],
        "code": inspect.getsource(heapq) + inspect.getsource(argparse),
    }
    size = PROMPT + STEPS + 1
    return {n: np.array(model.tokenizer.encode(t, special=False)[:size]) for n, t in texts.items()}


def answered(model: CompiledModel, base: Base | None) -> tuple[dict[str, Any], Base]:
    """The result of an artifact, and what it is made of."""
    told: dict[str, Any] = {}
    odds = {}
    for kind, ids in windows(model).items():
        odds[kind] = along(model, ids[:PROMPT], ids[PROMPT : PROMPT + STEPS])[1:]
        want = ids[PROMPT + 1 : PROMPT + STEPS + 1]
        told[f"perplexity {kind}"] = float(np.exp(-odds[kind][np.arange(STEPS), want].mean()))
        if base is not None:
            apart = divergence(base.odds[kind], odds[kind])
            told[f"kl {kind}"] = apart.kl / STEPS
            told[f"first {kind}"] = apart.same / STEPS
    told["keys"] = right(model, key_prompts(HIDDEN))
    told["numbers"] = right(model, number_prompts(HIDDEN))
    texts = [model.generate([[{"role": "user", "content": c}]], NEW).tokens[0] for c in CHATS]
    if base is not None:
        told["texts"] = sum(a == b for a, b in zip(texts, base.texts, strict=True))
    return told, Base(odds, texts)


def asked_of(model: Path) -> tuple[Program, Tokenizer]:
    """What is built, and its tokenizer. Raises InputError where it has no chat template."""
    tokenizer = open_source(model).tokenizer
    if tokenizer is None or not tokenizer.config.templates:
        raise InputError(f"{model.name} has no chat template, and is asked questions: give another")
    loaded = open_source(model).load()
    return capture(loaded.model, max_context=CONTEXT, stored=loaded.stored), tokenizer


def recall(model: Path, cases: list[Case], needles: int, skip: int = 0) -> None:
    """Print a row of a table for each; `skip`: prompts before the first that is asked."""
    warnings.filterwarnings("ignore")
    program, tokenizer = asked_of(model)
    prompts = key_prompts(skip + needles)[skip:], number_prompts(skip + needles)[skip:]
    print(
        f"| {model.name} | pass keys of {needles} | phone numbers of {needles} |\n|---|---:|---:|"
    )
    for case in cases:
        recipe = Recipe(case.recipe, tables=case.tables) if case.tables else Recipe.load("base")
        options = BuildOptions(max_context=CONTEXT, verify=False)
        try:
            with tempfile.TemporaryDirectory() as out:
                build_captured(program, recipe, options, tokenizer, Path(out) / "built").close()
                with accel.load(Path(out) / "built") as artifact:
                    counts = [str(right(artifact, some)) for some in prompts]
        except AccelError as error:
            counts = [f"refused, {' '.join(str(error).split())}", ""]
        print(f"| `{case.name}` | {' | '.join(counts)} |", flush=True)


def measure(model: Path, cases: list[Case], results: Path, train: bool = False) -> None:
    """Each in turn; base first, which the others are compared with."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    warnings.filterwarnings("ignore")
    options = BuildOptions(max_context=CONTEXT, train=train)
    with (
        Progress(*columns, disable=not sys.stderr.isatty()) as bar,
        tempfile.TemporaryDirectory() as place,
    ):
        task = bar.add_task("capture", total=len(cases))
        program, tokenizer = asked_of(model)
        base: Base | None = None
        for case in [Case("base"), *(c for c in cases if c.recipe != "base")]:
            bar.update(task, description=case.name)
            start, out = time.perf_counter(), Path(place) / case.recipe
            recipe = Recipe(case.recipe, tables=case.tables) if case.tables else Recipe.load("base")
            told: dict[str, Any] = {
                "name": case.recipe,
                "case": case.name,
                "model": model.name,
                "date": time.strftime("%Y-%m-%d"),
            }
            try:
                with build_captured(program, recipe, options, tokenizer, out) as built:
                    report = built.report
                told |= {"seconds": report["seconds"], "bytes": report["bytes"]["total"]}
                told |= {
                    "errors": report["errors"],
                    "loss": report.get("loss") or report.get("weights"),
                }
                with accel.load(out) as artifact:
                    found, mine = answered(artifact, base)
                told |= found
                base = base or mine
            except AccelError as error:
                said = " ".join(str(error).split()).replace(
                    str(Path(accel.__file__).parent), "accel"
                )
                told["refused"] = f"{type(error).__name__}: {said}"
            told["whole"] = round(time.perf_counter() - start, 1)
            keep(results / f"{case.recipe}.json", told)
            bar.advance(task)
            if bar.disable:
                print(f"{case.name}: {told['whole']} s {told.get('refused', '')}"[:160], flush=True)
            if out.exists():
                shutil.rmtree(out)


def known_already(kept: Path, model: str, results: Path, train: bool) -> set[str]:
    """Recipes whose result is in the folder, or in the file that the page was made of, if of this model. `train`: not
    those that lack a part.
    """
    lines = kept.read_text(encoding="utf-8").splitlines() if kept.is_file() else []
    own = [json.loads(path.read_text(encoding="utf-8")) for path in results.glob("*.json")]
    found = [one for one in [*map(json.loads, lines), *own] if one["model"] == model]
    return {one["name"] for one in found if not (train and LACKS in one.get("refused", ""))}


def page(found: list[dict[str, Any]]) -> str:
    """The text of the page, of results in their order."""
    built = [one for one in found if "refused" not in one]
    refused = [one for one in found if "refused" in one]
    dates = sorted({one["date"] for one in found})
    lines = [
        "# Every causal recipe on a real model",
        "",
        f"{found[0]['model']}, built with the default checks by `python tools/pages/real_recipes.py MODEL`, "
        f"{' to '.join(dict.fromkeys((dates[0], dates[-1])))}, {os.cpu_count()} cores, {platform.machine()}. "
        f"{len(found)} of {len(suited())} recipes were measured: {len(built)} are built and {len(refused)} refused.",
        "",
        f"KL from `base` per token, in nats, over {STEPS} tokens decoded one by one after a prompt of {PROMPT}, of "
        "Python's reference (prose) and of its library (code): few tokens, so differences below 0.01 say little. "
        f"Keys, numbers: what was found of {HIDDEN} pass keys, and of {HIDDEN} phone numbers among five, each hidden "
        f"in {SENTENCES} sentences (some 930 tokens). "
        f"Texts: of {len(CHATS)} answers of {NEW} tokens, those that are base's. "
        "`@N` is a recipe's budget in tokens, or its main option.",
        "",
        "| recipe | MB | KL prose | KL code | perplexity prose | code | keys | numbers | texts |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for one in sorted(built, key=lambda one: (one["name"] != "base", one["name"])):
        kl = [f"{one[f'kl {k}']:.4f}" if f"kl {k}" in one else "–" for k in ("prose", "code")]
        worse = [f"{one[f'perplexity {k}']:.2f}" for k in ("prose", "code")]
        texts = f"{one['texts']}" if "texts" in one else "–"
        lines.append(
            f"| `{one['case']}` | {one['bytes'] / 1e6:.0f} | "
            f"{' | '.join(kl)} | {' | '.join(worse)} | {one['keys']} | {one['numbers']} | {texts} |"
        )
    lines += ["", "## Refused", "", "| recipe | reason |", "|---|---|"]
    lines += [f"| `{one['case']}` | {one['refused'].replace('|', '/')} |" for one in refused]
    return "\n".join([*lines, ""])


def changed(case: Case, options: list[str]) -> Case:
    """A case with other options, AXIS.OPTION=VALUE, the value as in TOML; AXIS.use of an axis that it lacks adds that.
    Raises InputError.
    """
    tables = {axis: dict(table) for axis, table in case.tables.items()}
    for one in options:
        where, equals, value = one.partition("=")
        axis, _, option = where.rpartition(".")
        if option == "use":
            tables.setdefault(axis, {})
        if not equals or axis not in tables:
            raise InputError(f"--set {one}: give AXIS.OPTION=VALUE of {', '.join(tables)}")
        try:
            tables[axis][option] = tomllib.loads(f"value = {value}")["value"]
        except tomllib.TOMLDecodeError as error:
            raise InputError(f"--set {one}: {error}; write the value as TOML does") from None
    return replace(case, tables=tables)


def sized(case: Case, sizes: list[int]) -> list[Case]:
    """A case with other values of its budget; one without a budget as it is."""
    if not case.option or not sizes:
        return [case]
    return [
        replace(
            case,
            value=size,
            tables={
                axis: {**table, case.option: size} if case.option in table else table
                for axis, table in case.tables.items()
            },
        )
        for size in sizes
    ]


def main(
    model: Annotated[Path | None, typer.Argument(help="A folder or a GGUF file.")] = None,
    only: Annotated[list[str] | None, typer.Option(help="A recipe; may be repeated.")] = None,
    train: Annotated[
        bool, typer.Option("--train", help="Measure tables that recipes need: minutes for each.")
    ] = False,
    again: Annotated[bool, typer.Option(help="Measure what was measured before too.")] = False,
    write: Annotated[bool, typer.Option(help="Only write the page.")] = False,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="AXIS.OPTION=VALUE of the recipes of --only; nothing is kept."),
    ] = None,
    needles: Annotated[
        int, typer.Option(min=0, help="Print what --only finds of so many prompts of each kind.")
    ] = 0,
    budget: Annotated[
        list[int] | None, typer.Option(help="With --needles: of the recipes; may be repeated.")
    ] = None,
    skip: Annotated[
        int,
        typer.Option(
            min=0, help="With --needles: prompts to leave out, which options were chosen by."
        ),
    ] = 0,
    results: Path = ROOT / "build" / "real-recipes",
    docs: Path = ROOT / "docs" / "figures",
) -> None:
    """Measure what is missing, then write the page."""
    kept = docs / "details" / "real-recipes.jsonl"
    kept.parent.mkdir(parents=True, exist_ok=True)
    if not write:
        if model is None:
            raise typer.BadParameter("give MODEL, a folder or a GGUF file; or --write")
        known = suited()
        if wrong := [n for n in only or () if n not in known]:
            raise typer.BadParameter(f"no recipe {wrong[0]!r}; accel-compile recipes lists them")
        if needles:
            first = [changed(swept(name)[0], set_ or []) for name in only or ("base",)]
            cases = [c for case in first for c in sized(case, budget or [])]
            try:
                recall(model, cases, needles, skip)
            except InputError as error:
                raise typer.BadParameter(str(error)) from None
            return
        if set_:
            with tempfile.TemporaryDirectory() as place:
                cases = [changed(swept(name)[0], set_) for name in only or ()]
                measure(model, cases, Path(place))
                for case in cases:
                    told = json.loads((Path(place) / f"{case.recipe}.json").read_text())
                    print(f"{case.name} {' '.join(set_)}: {told}")
            return
        there = set() if again else known_already(kept, model.name, results, train)
        try:
            measure(model, [swept(n)[0] for n in only or known if n not in there], results, train)
        except InputError as error:
            raise typer.BadParameter(str(error)) from None
    found = {}
    if kept.is_file():
        found = {one["name"]: one for one in map(json.loads, kept.read_text().splitlines())}
    found |= {path.stem: json.loads(path.read_text()) for path in sorted(results.glob("*.json"))}
    if not found:
        raise typer.BadParameter(f"no results in {results}; run without --write")
    rows = [found[name] for name in sorted(found)]
    kept.write_text("".join(json.dumps(one, separators=(",", ":")) + "\n" for one in rows))
    (docs / "details" / "real-recipes.md").write_text(page(rows))


if __name__ == "__main__":
    typer.run(main)
