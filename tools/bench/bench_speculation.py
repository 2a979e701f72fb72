"""Every recipe that drafts, on the bundled model, against its own plain decoding and transformers' drafting.

    python tools/bench/bench_speculation.py [--prompts 3] [--tokens 96] [--repeat 3] [--only NAME ...]
        [--page docs/figures]

Each recipe is built and measured (accel-compile bench --speculation) in turn; results are kept in
build/speculation, one file each, and not measured again. --page writes docs/figures/speculation.md with its
pictures out of those that there are.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from statistics import median
from typing import Annotated, Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "pages"))
import typer
from bench_speculation_page import write
from rich.progress import track

import accel
from accel.commands.speculation import measure
from accel.ir.recipe import groups
from accel.reference.kinds import KINDS, prompts

ROOT = Path(__file__).resolve().parents[2]
MODEL = Path(str(files("accel.reference")))
RESULTS = ROOT / "build" / "speculation"
PEERS = ("transformers prompt lookup", "transformers assisted")
app = typer.Typer(add_completion=False)


def recipes() -> list[str]:
    """Those that draft, by name."""
    return [name for group in groups() if group.name == "speculation" for name in group.recipes]


@app.command()
def run(
    count: Annotated[int, typer.Option("--prompts", min=1, help="Prompts of each kind.")] = 3,
    tokens: Annotated[int, typer.Option(min=2, help="New tokens of each.")] = 96,
    repeat: Annotated[int, typer.Option(min=1, help="Pairs of runs of each prompt.")] = 3,
    only: Annotated[
        list[str] | None, typer.Option(help="Recipes, or transformers; by default all.")
    ] = None,
    page: Annotated[
        Path | None, typer.Option(help="The folder of the page; nothing is measured.")
    ] = None,
) -> None:
    """Measure what is not measured yet, or write the page."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    if page is not None:
        write(page, [json.loads(f.read_text()) for f in sorted(RESULTS.glob("*.json"))])
        return
    wanted = only or [*recipes(), "transformers"]
    for name in track(wanted, "recipes"):
        file = RESULTS / f"{name}.json"
        if file.exists():
            continue
        options = {"count": count, "tokens": tokens, "repeat": repeat}
        found = peers(**options) if name == "transformers" else _recipe(name, **options)
        file.write_text(json.dumps(found))


def _recipe(name: str, **options: int) -> dict[str, Any]:
    folder = RESULTS / "artifacts" / name
    if not folder.exists():
        accel.optimize(MODEL, name, out=folder, verify=False).close()
    return {"name": name, **measure(folder, **options)}


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
