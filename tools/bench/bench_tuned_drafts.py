"""How near draft models are to the bundled model, on held-out text and in drafts that it checks.

    python tools/bench/bench_tuned_drafts.py api/reference/draft [DIR ...] [--windows 12] [--prompts 1] [--tokens 64]

Stands: the mean of sum min(p, q), the chance that a token drawn from the draft model is accepted. Drafts are of 5
tokens, without a guard, over the six kinds of prompts; tokens of a check: greedy, and at temperature 1. Counts, no
times.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import turns
import typer
from tokenizers import Tokenizer
from torch import Tensor

import accel
from accel.compiler.assemble import assemble
from accel.compiler.train.divergences import stands
from accel.compiler.train.source import Source
from accel.compiler.train.whole import Whole
from accel.ir.axis import find_axes
from accel.ir.recipe import Recipe
from accel.reference.kinds import KINDS, prompts
from accel.runtime.decode.context import DecodeContext
from accel.runtime.decode.row import Row
from accel.runtime.loop.speculative import Speculative
from accel.runtime.sample.standard import Standard

sys.path.insert(0, str(Path(__file__).parents[1] / "train"))
from reference_export import windows

RECIPE, LENGTH = "draft-model", 5


def whole(folder: Path) -> Whole:
    """The model of a folder."""
    return Whole(Source(folder, None, None, lambda *_: None, print).program)


def nearness(said: list[Tensor], draft: Whole, rows: Tensor) -> tuple[float, float]:
    """How often a drawn token stands, and how often the two would choose the same, over rows [N,T] of which the target
    said [T,V].
    """
    near, same = list[float](), list[float]()
    for row, p in zip(rows, said, strict=True):
        q = draft.logits(row[None])[0]
        near.append(float(stands(p, q).mean()))
        same.append(float((p.argmax(-1) == q.argmax(-1)).float().mean()))
    return float(np.mean(near)), float(np.mean(same))


def checked(model: Any, temperature: float, count: int, tokens: int) -> tuple[float, float]:
    """Tokens of a check, and the share of drafted tokens that stood."""
    length = find_axes()["length"].build("fixed", tokens=LENGTH)
    methods = {**assemble(Recipe.load(RECIPE)).methods, "length": length}
    context, figures, given = DecodeContext(methods, None, model), Counter[str](), 0
    for number, text in enumerate(text for kind in KINDS for text in prompts(kind, count)):
        row = Row(
            np.array(model.tokenizer.encode(text), np.int64),
            Standard(temperature=temperature) if temperature else Standard(),
            np.random.default_rng(number),
            limit=tokens,
            max_context=model.facts.max_context,
        )
        with model.session() as session:
            given += sum(1 for _ in Speculative().tokens(session, [row], context))
        figures += row.drafting
    stood = figures["accepted"]
    return given / (given - stood), stood / max(1, figures["drafted"])


def run(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR ...")],
    count: Annotated[int, typer.Option("--windows", min=1, help="Of held-out text.")] = 12,
    each: Annotated[int, typer.Option("--prompts", min=1, help="Of each kind.")] = 1,
    tokens: Annotated[int, typer.Option(min=2, help="New ones of each prompt.")] = 64,
) -> None:
    """A line for each draft model."""
    tokenizer = Tokenizer.from_file(str(turns.REFERENCE / "tokenizer.json"))
    held = windows(tokenizer)
    rows = held[:: max(1, len(held) // count), :-1][:count]
    target = whole(turns.REFERENCE)
    said = [target.logits(row[None])[0] for row in rows]
    turns.head(
        "draft model",
        "a drawn token stands",
        "the same greedy token",
        "tokens of a check, greedy",
        "drafted that stood",
        "tokens of a check, sampled",
        "drafted that stood",
    )
    for folder in folders:
        near, same = nearness(said, whole(folder), rows)
        with accel.optimize(str(turns.REFERENCE), RECIPE, draft=folder, verify=False) as model:
            found = [checked(model, heat, each, tokens) for heat in (0.0, 1.0)]
        cells = [f"{near:.1%}", f"{same:.1%}"]
        cells += [cell for check, stood in found for cell in (f"{check:.2f}", f"{stood:.1%}")]
        turns.row(folder.name, *cells)


if __name__ == "__main__":
    typer.run(run)
