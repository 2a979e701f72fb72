"""What vectors of blocks find of attention, for `actqkv`: of keys by a table's mean query, a running mean, drawn
attention or chance, beside the attention itself.

    python tools/bench/block_vectors.py MODEL --needles 4

Rows are of the bundled text, and of questions about a hidden pass key. Of the newest queries of each layer, those with
as many blocks as are read choose blocks by one list for the layer (cosine over all heads). Reported: the share that
these have of the attention to all blocks, a mean over layers and queries; and of the last query of questions, behind
which the key comes, in how many layers the key's block is among them.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

sys.path.append(str(Path(__file__).resolve().parents[1] / "pages"))
from needles import key_prompts

from accel.compiler.load.source import open_source
from accel.compiler.part_text import text_ids
from accel.compiler.train.source import Source
from accel.ir.tables import Observed
from accel.passes.kv._shared.tables import observed
from accel.passes.kv.select.actqkv import unusual

SIZE, SINKS, WINDOW, BEST, CHUNK = 32, 64, 64, 4, 8
READ = 6  # blocks
DENSE = 2  # first layers, which read everything
AHEAD = 512  # queries that may draw attention to a key, as in the paper


def by_mean(queries: Tensor, x: Observed, keys: Tensor) -> Tensor:
    """Products with a mean query [H,D] of a group's heads."""
    asked = queries.unflatten(0, (keys.shape[0], -1)).mean(1)
    return (keys * asked[:, None]).sum(2)


def drawn(x: Observed, keys: Tensor) -> Tensor:
    """The attention that keys get from the next queries [G,N], but for those that choose."""
    weights = x.weights()[0].sum(1)  # [G,T,T]
    place = torch.arange(weights.shape[1])
    near = (place[:, None] - place < AHEAD) & (place[:, None] < len(place) - WINDOW)
    return (weights * near.float()).sum(1)[:, SINKS : SINKS + keys.shape[1]]


def vectors(keys: Tensor, scores: Tensor | None) -> Tensor:
    """Keys [G,U 32,D] -> the mean of each block's best ones, or of all [G,U,D]."""
    blocks = keys.unflatten(1, (-1, SIZE))
    if scores is None:
        return blocks.mean(2)
    best = scores.unflatten(1, (-1, SIZE)).topk(BEST, dim=2).indices
    return blocks.gather(2, best[..., None].expand(-1, -1, -1, keys.shape[2])).mean(2)


def probes(x: Observed, kind: str, statistics: tuple[Tensor, Tensor]) -> Tensor:
    """Queries [T,H,D], or means of the last few, by how unusual each is, or plain."""
    queries = x.queries[0].transpose(0, 1)
    if kind == "own":
        return queries
    weight = (
        unusual(queries[None], *statistics)[0] if kind == "unusual" else torch.ones(len(queries))
    )
    found = []
    for t in range(len(queries)):
        start = t - t % CHUNK
        some = weight[start : t + 1, None, None]
        found.append((some * queries[start : t + 1]).sum(0) / some.sum())
    return torch.stack(found)


def shares(x: Observed, made: Tensor, asked: Tensor, mass: Tensor) -> tuple[Tensor, Tensor]:
    """Of vectors [G,U,D] and probe queries [Q,H,D] the share of attention mass [Q,U] that the chosen blocks have [Q],
    and these [Q,READ].
    """
    wide = made.repeat_interleave(asked.shape[1] // len(made), 0).transpose(0, 1).flatten(1)
    like = torch.cosine_similarity(asked.flatten(1)[:, None], wide[None], dim=2)
    best = like.topk(READ, 1).indices
    return mass.gather(1, best).sum(1) / mass.sum(1), best


def measure(
    layers: dict[int, Observed], tables: dict[int, Any], needle: int | None
) -> dict[str, list[tuple[float, float]]]:
    """Variant -> of each layer the share, and whether the last query has the needle's block."""
    generator, found = torch.Generator().manual_seed(0), dict[str, list[tuple[float, float]]]()
    for i, x in layers.items():
        if i < DENSE:
            continue
        tokens = x.keys.shape[2]
        units = (tokens - SINKS - WINDOW) // SIZE
        end = SINKS + units * SIZE
        keys, late = x.keys[0, :, SINKS:end], torch.arange(tokens - WINDOW, tokens)
        mass = x.weights()[0].sum((0, 1))[late, SINKS:end].unflatten(1, (-1, SIZE)).sum(2)
        mean, variance = tables[i]
        order = torch.randperm(mean.numel(), generator=generator)
        seen = x.queries[0, :, : tokens - WINDOW].mean(1)
        plain: dict[str, Tensor | None] = {
            "keys by the table's mean query": by_mean(mean, x, keys),
            "… its numbers in another order": by_mean(mean.flatten()[order].view_as(mean), x, keys),
            "keys by the mean query of the tokens before": by_mean(seen, x, keys),
            "keys that drew most attention, as in the paper": drawn(x, keys),
            "keys by chance": torch.rand(keys.shape[:2], generator=generator),
            "all 32 keys": None,
        }
        made = {name: (vectors(keys, s), "own") for name, s in plain.items()}
        paper = made["keys that drew most attention, as in the paper"][0]
        made["… probe queries of 8 tokens, by how unusual"] = paper, "unusual"
        made["… probe queries of 8 tokens, plain means"] = paper, "plain"
        if x.unrotated is not None:
            bare = x.unrotated[0, :, SINKS:end]
            made["… keys and queries without positions"] = vectors(bare, drawn(x, keys)), "bare"
        for name, (vector, kind) in made.items():
            if kind == "bare":
                asked = x.unrotated_queries[0].transpose(0, 1)
            else:
                asked = probes(x, kind, (mean, variance))
            share, best = shares(x, vector, asked[late], mass)
            hit = needle is not None and bool((best[-1] == (needle - SINKS) // SIZE).any())
            found.setdefault(name, []).append((float(share.mean()), float(hit)))
        top = mass.topk(READ, 1)
        share = top.values.sum(1) / mass.sum(1)
        hit = needle is not None and bool((top.indices[-1] == (needle - SINKS) // SIZE).any())
        found.setdefault("blocks by the attention itself", []).append(
            (float(share.mean()), float(hit))
        )
    return found


def main(
    model: Path,
    needles: Annotated[int, typer.Option(min=1, help="Questions.")] = 4,
    texts: Annotated[int, typer.Option(min=1, help="Rows of the text.")] = 2,
    length: int = 900,
) -> None:
    """Print a table."""
    tokenizer = open_source(model).tokenizer
    assert tokenizer is not None
    source = Source(model, tokenizer, None, lambda *_: None, print)
    ids = text_ids(tokenizer, None, length)
    totals: dict[int, list[Any]] = {}
    for start in range(0, 4 * length, length):  # the table: of other tokens than are asked
        row = ids[None, start : start + length + 1]
        (rows,) = observed(source.program, [(row, torch.ones(1, length))])
        for i, x in rows.layers.items():
            flat = x.queries[0].double().transpose(0, 1)
            new = [flat.sum(0), flat.square().sum(0), len(flat)]
            totals[i] = [a + b for a, b in zip(totals[i], new, strict=True)] if i in totals else new
    tables = {
        i: ((s / n).float(), (q / n - (s / n).square()).clamp(min=0).float())
        for i, (s, q, n) in totals.items()
    }
    asked: list[tuple[str, Tensor, int | None]] = [
        ("text", ids[None, s : s + length + 1], None)
        for s in range(5 * length, (5 + texts) * length, length)
    ]
    for prompt, key in key_prompts(needles):
        head = tokenizer.apply_chat_template([{"role": "user", "content": prompt}])
        told = tokenizer.encode(f" {key}", special=False)
        place = next(i for i in range(len(head)) if head[i : i + len(told)] == told)
        row = [*head, *tokenizer.encode("The pass key is", special=False), told[0]]
        asked.append(("key", torch.tensor([row]), place))
    sums: dict[str, dict[str, list[Any]]] = {}
    for kind, row, needle in asked:
        (rows,) = observed(source.program, [(row, torch.ones(1, row.shape[1] - 1))])
        for name, told in measure(dict(rows.layers), tables, needle).items():
            sums.setdefault(name, {}).setdefault(kind, []).extend(told)
    print("| blocks by | of attention, text | of attention, question | layers that read the key |")
    print("|---|---:|---:|---:|")
    for name, kinds in sums.items():
        text, key = (torch.tensor(kinds[k]).mean(0) for k in ("text", "key"))
        print(f"| {name} | {text[0]:.3f} | {key[0]:.3f} | {key[1]:.2f} |", flush=True)


if __name__ == "__main__":
    typer.run(main)
