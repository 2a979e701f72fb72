"""What a first choice of a prompt's tokens keeps of the attention behind it, for `sentencekv`: of each head, of each
layer, and one for all.

    python tools/bench/first_drop.py MODEL --needles 15 --skip 20 --tokens 384

Rows are questions about a hidden pass key, with the begin of their answer. Tokens are chosen by the attention of the
prompt's last queries, a mean over neighbours, as `snapkv` scores them, or as `gemfilter` does, by the last query at one
layer. Reported: the share that they have of the attention to the prompt of the token behind which the key comes, a mean
over layers and heads, and of how many KV heads all tokens of the key stay.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import Tensor
from torch.nn.functional import avg_pool1d

sys.path.append(str(Path(__file__).resolve().parents[1] / "pages"))
from needles import key_prompts

from accel.compiler.load.source import open_source
from accel.compiler.train.source import Source
from accel.ir.tables import Observed
from accel.passes.kv._shared.tables import observed
from accel.passes.prefill.prune.gemfilter import GemFilter

WINDOW, KERNEL, DENSE = (
    16,
    5,
    2,
)  # queries that vote; neighbours; first layers, which read everything


def near(worth: Tensor) -> Tensor:
    """Means over neighbours [...,T]."""
    return avg_pool1d(worth, KERNEL, 1, KERNEL // 2, count_include_pad=False)


def votes(x: Observed, end: int) -> Tensor:
    """What the prompt's last queries attend to [G,T], of a prompt of T = `end` tokens."""
    return near(x.weights()[0][:, :, end - WINDOW : end, :end].mean((1, 2)))


def by_last(x: Observed, end: int) -> Tensor:
    """GemFilter's score [1,T]."""
    queries, keys = x.queries[:, :, end - 1 : end], x.keys[:, :, :end]
    at = x.positions[:, :end]
    return GemFilter().score(queries, at[:, -1:], keys, at)[:1]


def stays(worth: Tensor, count: int) -> Tensor:
    """The tokens [...,T] worth most, bool."""
    best = worth.topk(min(count, worth.shape[-1]), -1).indices
    return torch.zeros_like(worth, dtype=torch.bool).scatter(-1, best, True)


def main(
    model: Path,
    needles: Annotated[int, typer.Option(min=1, help="Questions.")] = 15,
    skip: Annotated[int, typer.Option(min=0, help="Questions before the first.")] = 20,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens that stay.")] = 384,
) -> None:
    """Print a table."""
    tokenizer = open_source(model).tokenizer
    assert tokenizer is not None
    source = Source(model, tokenizer, None, lambda *_: None, print)
    found: dict[str, list[tuple[float, float]]] = {}
    for prompt, key in key_prompts(skip + needles)[skip:]:
        head = tokenizer.apply_chat_template([{"role": "user", "content": prompt}])
        told = tokenizer.encode(f" {key}", special=False)
        places = [i for i in range(len(head)) if head[i : i + len(told)] == told]
        row = torch.tensor([[*head, *tokenizer.encode("The pass key is", special=False), told[0]]])
        (rows,) = observed(source.program, [(row, torch.ones(1, row.shape[1] - 1))])
        layers, end = rows.layers, len(head)
        heads = {i: votes(x, end) for i, x in layers.items()}
        every = torch.stack([v.mean(0) for v in heads.values()]).mean(0)[None]
        filtered = by_last(layers[len(layers) * 13 // 32], end)
        for i, x in layers.items():
            if i < DENSE:
                continue
            mass = x.weights()[0][:, :, -1, :end].mean(1)  # [G,T]
            chosen = {
                "each KV head": heads[i],
                "each layer": heads[i].mean(0, keepdim=True),
                "one, by all layers": every,
                "one, by `gemfilter`": filtered,
                "chance": torch.rand_like(every),
            }
            for name, worth in chosen.items():
                kept = stays(worth, tokens).expand_as(mass)
                share = (mass * kept).sum(1) / mass.sum(1)
                whole = torch.stack([kept[:, p : p + len(told)].all(1) for p in places]).any(0)
                told_of = float(share.mean()), float(whole.float().mean())
                found.setdefault(name, []).append(told_of)
    print("| choice | of attention | KV heads that keep the key |\n|---|---:|---:|")
    for name, each in found.items():
        share, whole = torch.tensor(each).mean(0).tolist()
        print(f"| {name} | {share:.3f} | {whole:.2f} |")


if __name__ == "__main__":
    typer.run(main)
