"""The loss of models on accel's own text: nats a token, of rows that runs of `accel-compile train` do not draw.

python tools/bench/nats.py MODEL TUNED
"""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Annotated

import typer

from accel.compiler.load.source import open_source
from accel.compiler.train.runs.mha2gqa import loss
from accel.compiler.train.source import Source
from accel.compiler.train.whole import Whole


def main(
    models: list[Path],
    length: Annotated[int, typer.Option(min=2, help="Tokens of a row.")] = 256,
    batches: Annotated[int, typer.Option(min=1, help="Of four rows.")] = 4,
    seed: int = 77,
) -> None:
    """Print a table."""
    print("| model | nats a token |\n|---|---:|")
    for model in models:
        tokenizer = open_source(model).tokenizer
        if tokenizer is None:
            raise typer.BadParameter(f"{model} has no tokenizer; give a folder with tokenizer.json")
        source = Source(model, tokenizer, None, lambda *_: None, lambda _: None)
        rows = list(islice(source.rows(length, 4, seed), batches))
        print(f"| {model.name} | {loss(Whole(source.program), rows):.3f} |", flush=True)


if __name__ == "__main__":
    typer.run(main)
