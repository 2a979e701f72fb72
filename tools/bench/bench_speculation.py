"""Every recipe that drafts, on the bundled model, against its own plain decoding and transformers' drafting.

    python tools/bench/bench_speculation.py [--prompts 3] [--tokens 96] [--repeat 3] [--only NAME ...]
        [--batch 1 --batch 8] [--temperature 0 --temperature 0.8] [--page docs/figures]
        [--model FILE [--draft FILE]]

A case is a recipe, a batch and a temperature. Each is built and measured (accel-compile bench --speculation) in turn;
its result is kept in build/speculation as soon as it is there, one file each, and not measured again with the same
settings and weights. A case that fails is told, and the others go on. --page writes docs/figures/speculation.md with
its pictures out of those that there are. At the end the ratios are printed, a table for each batch and temperature.

--model is another model, a GGUF file or a Hugging Face folder, whose results are kept in a folder of its name; --draft
the smaller one that drafts for it, or the folder of a head. Recipes that need one are left out without. A model with a
chat template answers questions of the same six kinds.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from importlib.resources import files
from pathlib import Path
from statistics import median
from typing import Annotated, Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "pages"))
import typer
from bench_speculation_page import ratios, write
from results import folder
from rich.progress import track

import accel
from accel.commands.speculation import measure
from accel.compiler.load.heads._folder import head_at
from accel.ir.axis import Axis
from accel.ir.recipe import Recipe, groups
from accel.reference.kinds import KINDS, prompts
from accel.runtime.draft import Base

MODEL = Path(str(files("accel.reference")))
RESULTS = folder("speculation")
DRAFTERS = Axis("draft", "accel.runtime.draft")
CONTEXT = 2048  # of another model than the bundled one
PEERS = ("transformers prompt lookup", "transformers assisted")
BATCHES, TEMPERATURES = (1, 8), (0.0, 0.8)
app = typer.Typer(add_completion=False)


@dataclass(frozen=True)
class Case:
    """What is measured at once. `name`: of a recipe, or transformers, which is measured greedily, a row at a time."""

    name: str
    batch: int = 1
    temperature: float = 0.0
    model: Path = field(default=MODEL, repr=False)
    draft: Path | None = field(default=None, repr=False)  # of another model than the bundled one

    @property
    def folder(self) -> Path:
        if self.model == MODEL:
            return RESULTS
        return folder("speculation", self.model, *([self.draft] if self.draft else []))

    @property
    def file(self) -> Path:
        return self.folder / f"{self.name}.{self.batch}.{self.temperature:g}.json"

    def kept(self, count: int, tokens: int, repeat: int) -> bool:
        """Whether there is its result, of as many prompts, tokens and runs."""
        if not self.file.exists():
            return False
        found = json.loads(self.file.read_text())
        whole = -(-count // self.batch) * self.batch
        return bool(
            (found["prompts"], found["new_tokens"], found["repeat"]) == (whole, tokens, repeat)
        )


def recipes() -> list[str]:
    """Those that draft, by name."""
    return [name for group in groups() if group.name == "speculation" for name in group.recipes]


def cases(
    names: list[str], batches: list[int], temperatures: list[float], *model: Any
) -> list[Case]:
    """A whole table after the other; `model`: as in Case."""
    found = []
    for temperature in temperatures:
        for batch in batches:
            found += [
                Case(name, batch, temperature, *model) for name in names if name != "transformers"
            ]
    return found + [Case(name) for name in names if name == "transformers"]


def given_to(name: str, model: Path, draft: Path | None) -> Recipe | None:
    """A recipe for a model, with its draft model or head; None where it needs one that is not given."""
    recipe = Recipe.load(name)
    mine = recipe.tables.get("draft", {})
    method = DRAFTERS.method(mine["use"]) if mine else Base
    if model == MODEL or mine.get("use") != "model" and not method.head:
        return recipe
    if draft is None or method.head != (head_at(draft) is not None):
        return None
    return replace(recipe, tables={**recipe.tables, "draft": {**mine, "path": str(draft)}})


@app.command()
def run(
    count: Annotated[int, typer.Option("--prompts", min=1, help="Prompts of each kind.")] = 3,
    tokens: Annotated[int, typer.Option(min=2, help="New tokens of each.")] = 96,
    repeat: Annotated[int, typer.Option(min=1, help="Pairs of runs of each prompt.")] = 3,
    only: Annotated[
        list[str] | None, typer.Option(help="Recipes, or transformers; by default all.")
    ] = None,
    batch: Annotated[
        list[int] | None, typer.Option(min=1, help="Prompts that run together; by default 1 and 8.")
    ] = None,
    temperature: Annotated[
        list[float] | None, typer.Option(min=0.0, help="By default 0 (greedy) and 0.8.")
    ] = None,
    page: Annotated[
        Path | None, typer.Option(help="The folder of the page; nothing is measured.")
    ] = None,
    model: Annotated[
        Path, typer.Option(help="A GGUF file or a Hugging Face folder.", exists=True)
    ] = MODEL,
    draft: Annotated[
        Path | None, typer.Option(help="The model or head that drafts for --model.", exists=True)
    ] = None,
) -> None:
    """Measure what is not measured yet and print the ratios, or write the page of the bundled model."""
    Case("", model=model, draft=draft).folder.mkdir(parents=True, exist_ok=True)
    if page is not None:
        write(page, [json.loads(f.read_text()) for f in sorted(RESULTS.glob("*.json"))], recipes())
        return
    names = only or [*recipes(), *(["transformers"] if model == MODEL else [])]
    if model != MODEL:
        out = [name for name in names if given_to(name, model, draft) is None]
        names = [name for name in names if name not in out]
        print(f"left out, as they need --draft: {', '.join(out) or 'none'}")
    wanted = cases(names, batch or list(BATCHES), temperature or list(TEMPERATURES), model, draft)
    options = {"count": count, "tokens": tokens, "repeat": repeat}
    todo, failed = [case for case in wanted if not case.kept(**options)], list[Case]()
    for case in track(todo, f"{len(todo)} cases"):
        try:
            found = _measured(case, **options)
        except Exception:
            traceback.print_exc()
            failed.append(case)
            continue
        part = case.file.with_suffix(".part")  # a result is there whole or not at all
        part.write_text(json.dumps(found))
        part.rename(case.file)
    done = [
        json.loads(c.file.read_text()) for c in wanted if c not in failed and c.name in recipes()
    ]
    print("\n".join(ratios(done)))
    for case in failed:
        print(f"FAILED {case}")
    if failed:
        raise typer.Exit(1)


def _measured(case: Case, **options: int) -> dict[str, Any]:
    if case.name == "transformers":
        return peers(**options)
    artifact = case.folder / "artifacts" / case.name
    if not artifact.exists():
        recipe = given_to(case.name, case.model, case.draft)
        assert recipe is not None, "left out"
        context = {} if case.model == MODEL else {"max_context": CONTEXT}
        accel.optimize(
            case.model, recipe, out=artifact, verify=False, max_batch=max(BATCHES), **context
        ).close()
    found = measure(artifact, batch=case.batch, temperature=case.temperature, **options)
    return {"name": case.name, **found}


def peers(count: int, tokens: int, repeat: int) -> dict[str, Any]:
    """transformers' own drafting of the same prompts with the same models, in turns with its plain decoding."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, draft = (
        AutoModelForCausalLM.from_pretrained(p, dtype=torch.float32)
        for p in (MODEL, MODEL / "draft")
    )
    model.generation_config.eos_token_id = draft.generation_config.eos_token_id = (
        10**6
    )  # none: look-up asks for one
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    common: dict[str, Any] = {"do_sample": False, "max_new_tokens": tokens}
    ways: dict[str, dict[str, Any]] = {
        "plain": {}, PEERS[0]: {"prompt_lookup_num_tokens": 10}, PEERS[1]: {"assistant_model": draft},
    }  # fmt: skip
    rows = []
    for kind in KINDS:
        speeds: dict[str, list[float]] = {way: [] for way in ways}
        for prompt in prompts(kind, count):
            ids = torch.tensor([tokenizer(prompt)["input_ids"]])
            for turn in range(repeat + 1):
                for way, more in ways.items():
                    speed = _speed(
                        lambda more=more, ids=ids: model.generate(ids, **common, **more),
                        ids.shape[1],
                    )
                    if turn:
                        speeds[way].append(speed)
        rows.append({"kind": kind, **{way: median(found) for way, found in speeds.items()}})
    return {
        "name": "transformers",
        "prompts": count,
        "new_tokens": tokens,
        "repeat": repeat,
        "rows": rows,
    }


def _speed(generate: Callable[[], Any], prompt: int) -> float:
    """New tokens a second, the prompt's own call among them."""
    import torch

    start = time.perf_counter()
    with torch.inference_mode():
        found = generate()
    return float(found.shape[1] - prompt) / (time.perf_counter() - start)


if __name__ == "__main__":
    app()
