"""Every causal recipe on a real model: built with the default checks, and what its artifact answers.

    python tools/pages/real_recipes.py MODEL                 measure what is missing, then write the page
    python tools/pages/real_recipes.py MODEL --only snapkv   some
    python tools/pages/real_recipes.py --write               only write the page

MODEL is captured once. Each recipe is built as `accel-compile build` does, and its artifact is opened: KL from base
after a prompt of prose and of code, a pass key in some 1000 tokens, and whether texts are base's. A recipe that is
refused is a result too. A result is kept in a file of its own as soon as it is there; a run that is stopped goes on
where it was. Prose and code are Python's own: its reference, and `heapq` and `argparse`.
"""

from __future__ import annotations

import argparse
import heapq
import inspect
import json
import os
import platform
import random
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import typer
from leaderboard import keep, suited
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import accel
from accel.compiler.build_options import BuildOptions
from accel.compiler.load.checkpoint import load_model
from accel.compiler.load.tokenizer import read_tokenizer
from accel.compiler.optimize import build_captured
from accel.compiler.quality.divergence import Odds, along, divergence
from accel.ir.capture.capture import capture
from accel.ir.errors import AccelError
from accel.ir.recipe import Recipe
from accel.runtime.model.compiled import CompiledModel

ROOT = Path(__file__).resolve().parents[2]
CONTEXT = 2048
PROMPT, STEPS = 512, 32  # tokens that are read, and then decoded along the text
KEYS, KEY_TOKENS = 2, 900  # prompts with a pass key, and about how long they are
CHATS = (
    "Why is the sky blue? Answer in two sentences.",
    "Write a Python function that merges two sorted lists.",
)
NEW = 32  # tokens of an answer


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


def key_prompts(model: CompiledModel) -> list[tuple[list[dict[str, str]], str]]:
    """Messages that hide a key in prose, and the key."""
    from pydoc_data.topics import topics

    assert model.tokenizer is not None
    found, prose = [], " ".join(topics["naming"].split())
    ids = model.tokenizer.encode(prose, special=False)
    for i in range(KEYS):
        rng = random.Random(i)
        key = str(rng.randrange(1000, 9999))
        start = rng.randrange(200)
        before, after = (
            ids[start : start + 300 * (i + 1)],
            ids[start + 300 * (i + 1) : start + KEY_TOKENS],
        )
        text = (
            f"{model.tokenizer.decode(before)} The pass key is {key}. Remember it. "
            f"{model.tokenizer.decode(after)}\n\nWhat is the pass key?"
        )
        found.append(([{"role": "user", "content": text}], key))
    return found


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
    keys = key_prompts(model)
    outs = [model.generate([messages], 16) for messages, _ in keys]
    told["keys"] = sum(
        key in (out.text or [""])[0] for out, (_, key) in zip(outs, keys, strict=True)
    )
    texts = [model.generate([[{"role": "user", "content": c}]], NEW).tokens[0] for c in CHATS]
    if base is not None:
        told["texts"] = sum(a == b for a, b in zip(texts, base.texts, strict=True))
    return told, Base(odds, texts)


def measure(model: Path, names: list[str], results: Path) -> None:
    """Each recipe in turn; base first."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    warnings.filterwarnings("ignore")
    options = BuildOptions(max_context=CONTEXT)
    with (
        Progress(*columns, disable=not sys.stderr.isatty()) as bar,
        tempfile.TemporaryDirectory() as place,
    ):
        task = bar.add_task("capture", total=len(names))
        tokenizer = read_tokenizer(None, model)
        loaded = load_model(model)
        program = capture(loaded.model, max_context=CONTEXT, stored=loaded.stored)
        base: Base | None = None
        for name in ["base", *(n for n in names if n != "base")]:
            bar.update(task, description=name)
            start, out = time.perf_counter(), Path(place) / name
            told: dict[str, Any] = {
                "name": name,
                "model": model.name,
                "date": time.strftime("%Y-%m-%d"),
            }
            try:
                with build_captured(program, Recipe.load(name), options, tokenizer, out) as built:
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
                told["refused"] = f"{type(error).__name__}: {' '.join(str(error).split())}"
            told["whole"] = round(time.perf_counter() - start, 1)
            keep(results / f"{name}.json", told)
            bar.advance(task)
            if bar.disable:
                print(f"{name}: {told['whole']} s {told.get('refused', '')}"[:160], flush=True)
            if out.exists():
                for file in out.iterdir():
                    file.unlink()
                out.rmdir()


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
        f"Of {len(found)} recipes {len(built)} are built and {len(refused)} refused.",
        "",
        f"KL from `base` per token, in nats, over {STEPS} tokens decoded one by one after a prompt of {PROMPT}, of "
        "Python's reference (prose) and of its library (code): few tokens, so differences below 0.01 say little.",
        f"Keys: pass keys found in {KEYS} prompts of some {KEY_TOKENS} tokens. "
        f"Texts: of {len(CHATS)} answers of {NEW} tokens, those that are base's.",
        "",
        "| recipe | MB | build, s | KL prose | KL code | perplexity prose | code | keys | texts |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for one in sorted(built, key=lambda one: (one["name"] != "base", one["name"])):
        kl = [f"{one[f'kl {k}']:.4f}" if f"kl {k}" in one else "–" for k in ("prose", "code")]
        worse = [f"{one[f'perplexity {k}']:.2f}" for k in ("prose", "code")]
        texts = f"{one['texts']}" if "texts" in one else "–"
        lines.append(
            f"| `{one['name']}` | {one['bytes'] / 1e6:.0f} | {one['seconds']['total']:.0f} | "
            f"{' | '.join(kl)} | {' | '.join(worse)} | {one['keys']} | {texts} |"
        )
    lines += ["", "## Refused", "", "| recipe | reason |", "|---|---|"]
    lines += [f"| `{one['name']}` | {one['refused'].replace('|', '/')} |" for one in refused]
    return "\n".join([*lines, ""])


def main(
    model: Annotated[Path | None, typer.Argument(help="A folder or a GGUF file.")] = None,
    only: Annotated[list[str] | None, typer.Option(help="A recipe; may be repeated.")] = None,
    again: Annotated[bool, typer.Option(help="Measure what was measured before too.")] = False,
    write: Annotated[bool, typer.Option(help="Only write the page.")] = False,
    results: Path = ROOT / "build" / "real-recipes",
    docs: Path = ROOT / "docs" / "figures",
) -> None:
    """Measure what is missing, then write the page."""
    kept = docs / "details" / "real-recipes.jsonl"
    if not write:
        if model is None:
            raise typer.BadParameter("give MODEL, a folder or a GGUF file; or --write")
        known = suited()
        if wrong := [n for n in only or () if n not in known]:
            raise typer.BadParameter(f"no recipe {wrong[0]!r}; accel-compile recipes lists them")
        there = {path.stem for path in results.glob("*.json")} if not again else set()
        measure(model, [n for n in only or known if n not in there], results)
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
