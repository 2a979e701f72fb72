"""What pauses between the halves of a text do to the loss of the tokens behind them.

    python tools/bench/bench_pause.py --part FILE

On the bundled model and held-out Python: rows of 128 tokens, cut in the middle. Behind the first half come no pauses,
or so many of the trained embedding, or of numbers by chance that are as large (the median of three draws), or the
embedding of the newline. The loss is that of the first token of the second half, of its first 16, and of all 64. After
each its standard error: of the mean, and of the mean difference from no pauses.
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
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor

from accel.compiler.load.source import open_source
from accel.compiler.over_state import over_state
from accel.compiler.train.runs.pause import Paused
from accel.ir.capture.capture import capture
from accel.ir.parts import bundled
from accel.passes.state.extra_ids import ROWS
from accel.passes.trained import ALL
from accel.runtime.prompt.pause import Pause

LENGTH, DRAWS, BATCH = 128, 3, 16
SPANS = (1, 16, LENGTH // 2)


def held_out(tokenizer: Tokenizer, rows: int) -> Tensor:
    """Rows [n,T]."""
    texts = sources()[1]
    np.random.default_rng(1).shuffle(texts)  # type: ignore[arg-type]
    ids = np.asarray(encode(tokenizer, texts)[: rows * LENGTH], np.int64)
    return torch.from_numpy(ids).view(-1, LENGTH)


@torch.no_grad()
def losses(soft: Paused, pause: Tensor, rows: Tensor, pauses: int) -> Tensor:
    """[n,T/2]."""
    return torch.cat([soft.losses(pause, part, pauses) for part in rows.split(BATCH)])


def line(name: str, found: Tensor, base: Tensor) -> str:
    cells = []
    for span in SPANS:
        mean, more = found[:, :span].mean(1), (found - base)[:, :span].mean(1)
        error = (mean if found is base else more).std() / len(mean) ** 0.5
        cells.append(f"{mean.mean():.3f} ({more.mean():+.3f} ± {error:.3f})")
    return f"| {name} | {' | '.join(cells)} |"


def main(
    part: Annotated[Path | None, typer.Option(help="Default: the bundled one.")] = None,
    count: Annotated[int, typer.Option(help="Rows.")] = 128,
) -> None:
    loaded = open_source(REFERENCE).load(False)
    soft = Paused(over_state(capture(loaded.model, stored=loaded.stored)), Pause())
    tokenizer = Tokenizer.from_file(str(REFERENCE / "tokenizer.json"))
    rows = held_out(tokenizer, count)
    trained = load_file(part or bundled("pause"))[f"all.{ROWS}"].float()
    newline = soft.embeddings(torch.tensor([tokenizer.encode("\n").ids[-1:]]))[0]
    size = trained.norm()
    base = losses(soft, trained, rows, 0)
    print("| pauses | first token | first 16 | all 64 |\n|---|---:|---:|---:|")
    print(line("none", base, base), flush=True)
    for pauses in (1, 10):
        print(line(f"{pauses} trained", losses(soft, trained, rows, pauses), base), flush=True)
        draws = [soft.start(1, seed)[ALL][ROWS] for seed in range(DRAWS)]
        tried = [losses(soft, d * size / d.norm(), rows, pauses) for d in draws]
        tried.sort(key=lambda one: float(one.mean()))
        print(line(f"{pauses} by chance", tried[len(tried) // 2], base), flush=True)
        print(line(f"{pauses} newlines", losses(soft, newline, rows, pauses), base), flush=True)


if __name__ == "__main__":
    typer.run(main)
