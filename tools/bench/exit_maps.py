"""How often an exit of the bundled model has the last layer's token, by a linear map of the stream and without one.

    python tools/bench/exit_maps.py [--rank 32] [--learnt 24576] [--measured 8192]

A map adds to the stream behind a layer what the layers above would, as far as least squares over tokens of the
training text can tell; of a rank, its largest singular values. Measured on held-out Python, in rows of 128 tokens.
What adapters that carry a stream past layers would have to beat (M2R2, arXiv:2502.02040).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

sys.path.append(str(Path(__file__).resolve().parents[1] / "train"))
import numpy as np
import torch
import typer
from reference_data import REFERENCE, encode, sources
from tokenizers import Tokenizer
from torch import Tensor
from turns import head, row

from accel.compiler.load.source import open_source
from accel.compiler.pipeline import pipeline
from accel.ir.capture.capture import capture
from accel.passes import run
from accel.passes.depth._joint import layers
from accel.passes.stream import Stream

LENGTH, BATCH = 128, 32


def rows_of(texts: list[str], count: int, seed: int) -> Tensor:
    """Rows [n,T] of a text."""
    tokenizer = Tokenizer.from_file(str(REFERENCE / "tokenizer.json"))
    np.random.default_rng(seed).shuffle(texts)  # type: ignore[arg-type]
    ids = torch.from_numpy(np.asarray(encode(tokenizer, texts)[:count], np.int64))
    return ids[: len(ids) // LENGTH * LENGTH].view(-1, LENGTH)


class Exits:
    """The streams of a text behind some layers, and behind the last."""

    def __init__(self) -> None:
        source = open_source(REFERENCE)
        loaded = source.load()
        self.program = capture(loaded.model, max_context=LENGTH, stored=loaded.stored)
        run(self.program, pipeline())
        self.calls = layers(self.program)
        count = len(self.calls)
        self.places = [count // 2 - 1, 3 * count // 4 - 1]

    @torch.no_grad()
    def streams(self, rows: Tensor) -> tuple[list[Tensor], Tensor]:
        """[N,E] behind each exit, and behind the last layer."""
        kept: list[list[Tensor]] = [[] for _ in self.places]
        last = []
        for part in rows.split(BATCH):
            stream = Stream(self.program, self.calls, part)
            x = stream.start
            for index in range(len(self.calls)):
                x = stream.layer(index, x)
                if index in self.places:
                    kept[self.places.index(index)].append(x.flatten(0, 1))
            last.append(x.flatten(0, 1))
        return [torch.cat(one) for one in kept], torch.cat(last)

    @torch.no_grad()
    def tokens(self, x: Tensor) -> Tensor:
        """The likeliest token [N] of streams [N,E]."""
        part = torch.zeros(1, LENGTH, dtype=torch.int64)
        stream = Stream(self.program, self.calls, part)
        rows = x.view(-1, LENGTH, x.shape[1])
        return torch.cat([stream.logits(row[None]).argmax(-1)[0] for row in rows])


def mapped(x: Tensor, change: Tensor, rank: int | None) -> Tensor:
    """The map [E+1,E] of least squares from streams [N,E] to a change of theirs, of a rank."""
    wide = torch.cat([x, torch.ones(len(x), 1)], 1).double()
    found = torch.linalg.lstsq(wide, change.double()).solution
    if rank is not None:
        u, s, v = torch.linalg.svd(found, full_matrices=False)
        found = (u[:, :rank] * s[:rank]) @ v[:rank]
    return found.float()


def main(
    rank: Annotated[int, typer.Option(min=1)] = 32,
    learnt: Annotated[int, typer.Option(min=1024)] = 24_576,
    measured: Annotated[int, typer.Option(min=1024)] = 8192,
) -> None:
    training, held = sources()
    exits = Exits()
    known, whole = exits.streams(rows_of(training, learnt, 0))
    seen, last = exits.streams(rows_of(held, measured, 1))
    want = exits.tokens(last)
    head("exit", ">plain", ">a map", f">of rank {rank}")
    for place, x, other in zip(exits.places, known, seen, strict=True):
        cells = [float((exits.tokens(other) == want).float().mean())]
        for size in (None, rank):
            by = mapped(x, whole - x, size)
            ones = torch.cat([other, torch.ones(len(other), 1)], 1)
            cells.append(float((exits.tokens(other + ones @ by) == want).float().mean()))
        row(f"behind layer {place + 1} of {len(exits.calls)}", *(f"{100 * c:.1f} %" for c in cells))


if __name__ == "__main__":
    typer.run(main)
