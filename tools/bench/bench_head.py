"""What `vq-logits` gives on a real model, beside its own head: for docs/figures/details/depth.md.

    python tools/bench/bench_head.py MODEL [--rerank 64] [--codes 0] [--rounds 9] [--keep FOLDER]

The model's own head answers prompts greedily; the other one reads these answers token by token, and it counts how often
its likeliest token is the next one. Then both decode the first prompt in turns; the ratio is a median, with its range.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Annotated

import numpy as np
import typer

import accel
from accel.runtime.model.compiled import CompiledModel

PROMPTS = (
    "The history of the city begins",
    "def fibonacci(n):\n",
    "Water is important because",
    "import os\n\nclass Path",
    "Once upon a time there was a small",
    "The main difference between TCP and UDP is",
    "SELECT name FROM",
    "In 1969, the first",
)


def main(
    model: Path,
    codes: int = 0,
    rerank: int = 64,
    tokens: Annotated[int, typer.Option(help="of each answer")] = 48,
    rounds: int = 9,
    keep: Annotated[Path | None, typer.Option(help="builds are kept here, and taken from")] = None,
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        own, other = (
            _opened(model, keep or Path(folder), name, head)
            for name, head in (
                ("own", {}),
                (f"vq-{codes}-{rerank}", {"use": "vq-logits", "codes": codes, "rerank": rerank}),
            )
        )
        same, count = agreement(own, other, tokens)
        ratios, mine = speed(own, other, rounds, tokens)
        note = next(n for n in other.report["notes"] if n.startswith("vq-logits"))
        print(
            "| head | same likeliest token | tokens/s of the own head's | own head, tokens/s |\n|---|---|---|---|"
        )
        faster = f"**{median(ratios):.2f}** ({min(ratios):.2f}..{max(ratios):.2f})"
        print(f"| {note} | {same / count:.1%} of {count} | {faster} | {mine:.1f} |")
        own.close()
        other.close()


def _opened(model: Path, folder: Path, name: str, head: dict[str, object]) -> CompiledModel:
    out = folder / f"{model.stem}-{name}"
    if not out.exists():
        accel.optimize(model, {"head": head} if head else "base", max_context=1024, out=out).close()
    return accel.load(out)


def agreement(own: CompiledModel, other: CompiledModel, tokens: int) -> tuple[int, int]:
    """Tokens of greedy answers that the other head has for the likeliest, and how many there are."""
    same = count = 0
    for prompt in PROMPTS:
        assert own.tokenizer is not None
        ids = np.array(own.tokenizer.encode(prompt))
        answer = np.array(own.generate(ids, tokens).tokens[0])
        with other.session() as session:
            session.run(ids[None], last_only=True)
            for token, then in zip(answer, answer[1:], strict=False):
                same += int(session.run(np.array([[token]]))[0, -1].argmax() == then)
                count += 1
    return same, count


def speed(
    own: CompiledModel, other: CompiledModel, rounds: int, tokens: int
) -> tuple[list[float], float]:
    """How many times as many tokens per second the other head gives in each round, and the median of the own one's."""
    assert own.tokenizer is not None
    ids = np.array(own.tokenizer.encode(PROMPTS[0]))
    ratios, mine = [], []
    for turn in range(rounds):
        rates = {}
        for model in (own, other) if turn % 2 else (other, own):
            start = time.perf_counter()
            made = len(model.generate(ids, tokens).tokens[0])
            rates[model is own] = made / (time.perf_counter() - start)
        ratios.append(rates[False] / rates[True])
        mine.append(rates[True])
    return ratios, median(mine)


if __name__ == "__main__":
    typer.run(main)
