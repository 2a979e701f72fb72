"""What lengths make of a draft model: tokens of a call of the model, and calls of the draft for each of them.

    python tools/bench/draft_lengths.py [--prompts 2] [--tokens 96] [--temperature 0] [--recipe NAME] [--cost COST]
    python tools/bench/draft_lengths.py MODEL --draft MODEL [--kind code] [--only "fixed, 2" ...]

Of the bundled pair or another; greedy, or with --temperature, over the six kinds of prompts or some of them. --cost:
what a call of the draft model takes, a call of the model being 1, whatever its width; by it the last column says how
many times as fast as plain decoding that is. The guard is left out (it goes by times, and so by what else the machine
does): what is counted is the same on every machine.
"""

from __future__ import annotations

from collections import Counter
from typing import Annotated

import numpy as np
import turns
import typer

import accel
from accel.compiler.assemble import assemble
from accel.ir.axis import find_axes
from accel.ir.recipe import Recipe
from accel.reference.kinds import KINDS, prompts
from accel.runtime.decode.context import DecodeContext
from accel.runtime.decode.row import Row
from accel.runtime.loop.speculative import Speculative
from accel.runtime.sample.standard import Standard

COST = 0.125  # 0.11 ms of 0.88: docs/figures/details/draft-models.md, "What a draft model's weights cost"
LENGTHS = {
    "fixed, 2": {"use": "fixed", "tokens": 2},
    "fixed, 3": {"use": "fixed", "tokens": 3},
    "fixed, 5": {"use": "fixed", "tokens": 5},
    "fixed, 7": {"use": "fixed", "tokens": 7},
    "fixed, 10": {"use": "fixed", "tokens": 10},
    "fixed, 15": {"use": "fixed", "tokens": 15},
    "fixed, 31": {"use": "fixed", "tokens": 31},
    "hf-assist": {"use": "hf-assist"},
    "hf-assist, heuristic": {"use": "hf-assist", "schedule": "heuristic"},
    "specdec-pp": {"use": "specdec-pp"},
    "specdec-pp, threshold 0.7": {"use": "specdec-pp", "threshold": 0.7},
    "specdec-pp, threshold 0.95": {"use": "specdec-pp", "threshold": 0.95},
    "disco": {"use": "disco"},
    "disco, threshold 0.2": {"use": "disco", "threshold": 0.2},
    "disco, threshold 0.5": {"use": "disco", "threshold": 0.5},
    "mcsd-improved": {"use": "mcsd-improved"},
    "mcsd-improved, threshold 0.7": {"use": "mcsd-improved", "threshold": 0.7},
}


def run(
    pair: Annotated[
        str, typer.Argument(metavar="[MODEL]", help="A directory or a GGUF file.")
    ] = "",
    draft: Annotated[str, typer.Option(help="Its draft model; empty: the bundled one.")] = "",
    kind: Annotated[list[str] | None, typer.Option(help="Of prompts; by default all.")] = None,
    count: Annotated[int, typer.Option("--prompts", min=1, help="Prompts of each kind.")] = 2,
    tokens: Annotated[int, typer.Option(min=2, help="New tokens of each.")] = 96,
    temperature: Annotated[float, typer.Option(min=0, help="0: greedy.")] = 0,
    cost: Annotated[float, typer.Option(min=0, help="Of a call of the draft model.")] = COST,
    recipe: Annotated[
        str, typer.Option(help="Whose drafts, but for their lengths.")
    ] = "draft-model",
    only: Annotated[
        list[str] | None, typer.Option(help="Lengths whose names begin so; by default all.")
    ] = None,
) -> None:
    """A line for each length."""
    axes = find_axes()
    with accel.optimize(
        pair or str(turns.REFERENCE), recipe, draft=draft or None, verify=not pair
    ) as model:
        methods = assemble(Recipe.load(recipe)).methods
        texts = [text for one in kind or KINDS for text in prompts(one, count)]
        drafted = ("drafted tokens for each that stood", "drafts that stood whole")
        turns.head("length", "tokens of a call", *drafted, "speed")
        for name, table in LENGTHS.items():
            if not name.startswith(tuple(only or ("",))):
                continue
            options = {k: v for k, v in table.items() if k != "use"}
            context = DecodeContext(
                {**methods, "length": axes["length"].build(table["use"], **options)}, None, model
            )
            figures, drafts, given = Counter[str](), Counter[tuple[int, int]](), 0
            for text in texts:
                ids = np.array(model.tokenizer.encode(text), np.int64)
                row = Row(
                    ids,
                    Standard(temperature=temperature) if temperature else Standard(),
                    np.random.default_rng(0),
                    limit=tokens,
                    max_context=model.facts.max_context,
                )
                with model.session() as session:
                    given += sum(1 for _ in Speculative().tokens(session, [row], context))
                figures += row.drafting
                drafts += row.drafts
            calls = given - figures["accepted"]
            whole = sum(n for (drafted, stood), n in drafts.items() if drafted == stood) / max(
                1, drafts.total()
            )
            levels = sum(deep * n for (deep, _), n in drafts.items())
            waste = figures["drafted"] / max(1, figures["accepted"])
            speed = f"{given / (calls + cost * levels):.2f}"
            turns.row(name, f"{given / calls:.2f}", f"{waste:.2f}", f"{100 * whole:.0f} %", speed)


if __name__ == "__main__":
    typer.run(run)
