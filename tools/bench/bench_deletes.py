"""Which layers each deleting method takes, by prose and by code, and what that costs: for docs/figures/details.

    python tools/bench/bench_deletes.py MODEL [--tokens 512] [--random 3]

Each method orders the layers by 16 rows of 256 tokens of prose, and by as many of code (of sleb `--tokens` of them).
Perplexity is of 4 other rows of each, with the layers passed by: what deletes them is held to the same numbers by
`tests/laws/test_depth_deletes.py`. The control deletes layers by chance; the first and the last stay there, too.
"""

from __future__ import annotations

import math
import random
import time
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, fx
from weights_loss import texts

from accel.compiler.load.source import open_source
from accel.compiler.pipeline import pipeline
from accel.ir.axis import find_axes
from accel.ir.calibration import Calibration
from accel.ir.capture.capture import capture
from accel.ir.errors import PassError
from accel.ir.program import Program
from accel.passes import run
from accel.passes.depth._delete import Deletes
from accel.passes.depth._joint import layers
from accel.passes.stream import Stream

ROW, ORDERED, MEASURED = 256, 16, 4  # tokens of a row, and rows
SHARES = (0.1, 0.25)


def main(
    model: Path,
    tokens: Annotated[int, typer.Option(help="that sleb goes by")] = 512,
    chance: Annotated[int, typer.Option("--random", help="draws of the control")] = 3,
) -> None:
    source = open_source(model)
    loaded = source.load()
    program = capture(loaded.model, max_context=ROW, stored=loaded.stored)
    run(program, pipeline())
    tokenizer = source.tokenizer
    assert tokenizer is not None
    encode = tokenizer.encode
    found = texts(lambda text: encode(text, special=False), ORDERED + MEASURED, ROW)
    rows = {name: torch.tensor(ids) for name, ids in found.items()}
    calls = layers(program)
    measure = Measure(program, calls, {name: ids[ORDERED:] for name, ids in rows.items()})
    counts = [int(share * len(calls)) for share in SHARES]
    print(
        "| method | by | layers deleted, in this order | "
        + " | ".join(measure.heads(counts))
        + " | s |"
    )
    print("|---|---|---|" + "---|" * (len(measure.texts) * len(counts)) + "---|", flush=True)
    print(
        f"| all {len(calls)} layers | | | " + " | ".join(measure([]) * len(counts)) + " | |",
        flush=True,
    )
    axis = find_axes()["depth"]
    for name in (n for n in axis.names() if issubclass(axis.method(n), Deletes)):
        method = axis.build(name, **({"tokens": tokens} if name == "sleb" else {}))
        for text, ids in rows.items():
            start = time.monotonic()
            program.calibration = Calibration(ids[:ORDERED], ids[ORDERED:], "given")
            try:
                order = list(method.goes(program, calls, max(counts), method.text(program)))
            except PassError as error:
                print(f"| `{name}` | {text} | {error} |")
                continue
            seconds = time.monotonic() - start
            cells = [cell for n in counts for cell in measure(order[:n])]
            listed = " ".join(map(str, order))
            print(
                f"| `{name}` | {text} | {listed} | {' | '.join(cells)} | {seconds:.0f} |",
                flush=True,
            )
    drawn = [random.Random(n).sample(range(1, len(calls) - 1), max(counts)) for n in range(chance)]
    control = [[x for n in counts for x in measure.numbers(order[:n])] for order in drawn]
    cells = [f"{median(x):.1f} ({min(x):.1f}–{max(x):.1f})" for x in zip(*control, strict=True)]
    print(f"| chance, {chance} draws | | | {' | '.join(cells)} | |")


class Measure:
    """Perplexity of texts without some layers."""

    def __init__(self, program: Program, calls: list[fx.Node], rows: dict[str, Tensor]):
        self.texts = {
            name: [Stream(program, calls, part) for part in ids.split(2)]
            for name, ids in rows.items()
        }

    def heads(self, counts: list[int]) -> list[str]:
        return [f"{name}, {n} less" for n in counts for name in self.texts]

    def numbers(self, gone: list[int]) -> list[float]:
        return [self._one(streams, gone) for streams in self.texts.values()]

    def __call__(self, gone: list[int]) -> list[str]:
        return [f"{x:.2f}" for x in self.numbers(gone)]

    def _one(self, streams: list[Any], gone: list[int]) -> float:
        loss, count = 0.0, 0
        with torch.no_grad():
            for stream in streams:
                x = stream.start
                for i in range(len(stream.calls)):
                    x = x if i in gone else stream.layer(i, x)
                loss += float(stream.losses(x).sum())
                count += stream.tokens.numel() - len(stream.tokens)
        return math.exp(loss / count)


if __name__ == "__main__":
    typer.run(main)
