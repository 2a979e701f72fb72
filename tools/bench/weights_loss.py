"""What each way to store weights costs the bundled model, or yours: a table for docs/figures/details/weights.md.

    python tools/bench/weights_loss.py
    python tools/bench/weights_loss.py --model my-model --recall 0 int8 int4 int4-gptq

Each recipe is built, and reports bits per weight, KL from float32 and perplexity on its held-out text;
`--recall` asks so many prompts of 500 tokens of each recall task of the bundled model, and counts the
exact answers.
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "train"))
from reference_data import REFERENCE, tasks
from rich.console import Console
from rich.progress import track

import accel
from accel.runtime.model.compiled import CompiledModel

RECIPES = ("base", "float16", "int8", "mixed", "int4", "int4-awq", "int4-gptq")
TASKS = ("pass_key", "key_value", "copy")
PROMPT = 500  # tokens
WHOLE = "float32's"  # where its perplexity goes, which other recipes' reports tell


def recall(compiled: CompiledModel, task: str, count: int) -> int:
    """How many of `count` prompts of a task are answered exactly, in greedy decoding."""
    right = 0
    for seed in range(count):
        prompt, answer = tasks.make(task, random.Random(seed), PROMPT)
        assert compiled.tokenizer is not None
        length = len(compiled.tokenizer.encode(answer, special=False))
        right += compiled.generate([prompt], max_new_tokens=length).text == [answer]
    return right


def row(model: Path, recipe: Any, prompts: int) -> tuple[list[str], float | None]:
    """Cells of a line of the table, and the perplexity of float32 on the same text; None where nothing was rounded."""
    with accel.optimize(model, recipe) as compiled:
        found = compiled.report.get("weights", {})
        cells = [
            f"{found.get('bits_per_weight', 32):.2f}",
            f"{found['kl']:.4f}" if found else "0",
            f"{found['perplexity']:.2f}" if found else WHOLE,
        ]
        if prompts:
            cells += [f"{100 * recall(compiled, task, prompts) / prompts:.0f}" for task in TASKS]
        return cells, found["perplexity_float32"] if found else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipes", nargs="*", default=list(RECIPES))
    parser.add_argument("--model", type=Path, default=REFERENCE, help="a model directory")
    parser.add_argument("--recall", type=int, default=20, metavar="N", help="prompts of each task")
    given = parser.parse_args()
    names = ["recipe", "bits per weight", "KL", "perplexity", *(TASKS if given.recall else ())]
    rows, whole = [], ""
    for recipe in track(given.recipes, "recipes", console=Console(stderr=True)):
        cells, perplexity = row(given.model, recipe, given.recall)
        rows.append([recipe, *cells])
        whole = whole if perplexity is None else f"{perplexity:.2f}"
    print("| " + " | ".join(names) + " |")
    print("| --- |" + " ---: |" * (len(names) - 1))
    for cells in rows:
        print("| " + " | ".join(cells).replace(WHOLE, whole) + " |")


if __name__ == "__main__":
    main()
