"""What `leoam` could know of a model's attention: how much of it pages of each size hold, layer by layer, and how many
of the pages that a layer reads were read before, by the layer beneath or by the token before.

    python tools/bench/chunks.py MODEL --length 2048 --read 256

Pages are chosen as `quest` chooses them, by bounds of their keys, so many tokens at each of a row's last queries, for
each KV head; every size reads as many tokens. A list of the layer beneath is of the same query.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import Tensor

from accel.compiler.load.source import open_source
from accel.compiler.part_text import text_ids
from accel.compiler.train.source import Source
from accel.ir.tables import Observed
from accel.passes.kv._shared.tables import observed

SIZES, QUERIES, DENSE = (16, 32, 64, 128), 64, 2


def chosen(x: Observed, page: int, read: int) -> Tensor:
    """The pages before its own that each of the last queries reads: bool [G,Q,N]."""
    keys = x.keys[0]  # [G,T,D]
    tokens = keys.shape[1] // page * page
    pages = keys[:, :tokens].unflatten(1, (-1, page))
    high, low = pages.amax(2), pages.amin(2)  # [G,N,D]
    late = torch.arange(keys.shape[1] - QUERIES, keys.shape[1])
    queries = x.queries[0].unflatten(0, (len(keys), -1))[:, :, late]  # [G,R,Q,D]
    up, down = queries.clamp(min=0), queries.clamp(max=0)
    bounds = up @ high.mT[:, None] + down @ low.mT[:, None]  # [G,R,Q,N]
    worth = bounds.amax(1)
    before = torch.arange(worth.shape[2]) < (late // page)[:, None]
    best = worth.masked_fill(~before, -torch.inf).topk(read // page - 1, 2).indices
    return torch.zeros_like(worth, dtype=torch.bool).scatter(2, best, True)


def share(x: Observed, listed: Tensor, page: int) -> float:
    """Of the attention to tokens before a query's own page, how much the list has."""
    groups, queries, pages = listed.shape
    late = torch.arange(x.keys.shape[2] - queries, x.keys.shape[2])
    mass = x.weights()[0][:, :, late, : pages * page].unflatten(3, (-1, page)).sum(4)
    mass = mass * (torch.arange(pages) < (late // page)[:, None])
    mass = mass.sum(1)  # [G,Q,N]
    return float((mass * listed).sum() / mass.sum())


def both(a: Tensor, b: Tensor) -> float:
    """Of the pages of a list, how many stand in another."""
    return float((a & b).sum() / a.sum())


def main(
    model: Path,
    texts: Annotated[int, typer.Option(min=1, help="Rows of the text.")] = 2,
    length: Annotated[int, typer.Option(min=512, help="Tokens of a row.")] = 2048,
    read: Annotated[int, typer.Option(min=256, help="Tokens that a query reads.")] = 256,
) -> None:
    """Print a table of layers."""
    tokenizer = open_source(model).tokenizer
    assert tokenizer is not None
    source = Source(model, tokenizer, None, lambda *_: None, print)
    ids = text_ids(tokenizer, None, length)
    found: dict[int, list[list[float]]] = {}
    for start in range(0, texts * length, length):
        row = ids[None, start : start + length + 1]
        (rows,) = observed(source.program, [(row, torch.ones(1, row.shape[1] - 1))])
        beneath: Tensor | None = None
        for i, x in rows.layers.items():
            lists = {page: chosen(x, page, read) for page in SIZES}
            told = [share(x, listed, page) for page, listed in lists.items()]
            mine = lists[SIZES[0]]
            told.append(both(mine, beneath) if beneath is not None else float("nan"))
            told.append(both(mine[:, 1:], mine[:, :-1]))
            found.setdefault(i, []).append(told)
            beneath = mine
    table = {i: torch.tensor(told).mean(0) for i, told in found.items()}
    sizes = " | ".join(f"pages of {page}" for page in SIZES)
    print(f"| layer | {sizes} | read by the layer beneath | read by the token before |")
    print(f"|---|{'---:|' * (len(SIZES) + 2)}")
    late = torch.stack([told for i, told in table.items() if i >= DENSE]).mean(0)
    for name, told in [*table.items(), (f"all from {DENSE} on", late)]:
        print(f"| {name} | {' | '.join(f'{value:.3f}' for value in told)} |")


if __name__ == "__main__":
    typer.run(main)
