"""How much of what the model drafts without its middle layers stands, on a text, with equal drafts and no guard.

    python tools/bench/bench_self_drafts.py TEXT [--part FILE] [--prompts 16] [--size 64] [--tokens 64] [--draft 5]

`s3d` drafts by one pass over trained masks; its controls have masks and products by chance, or the trained product with
such masks. `s3d-midskip` runs the same layers for each token, which no mask stands for. Printed are the tokens that a
call gives which checks a draft, the one that comes anyway included, the layers that drafts and checks ran for each of
them, and whether all tokens are those of plain decoding. A call counts each layer once, whatever its tokens.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent))
import numpy as np
import torch
import typer
from bench_heads import BATCH, MODEL, plain, rows_of
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import accel
from accel.ir.axis import Axis
from accel.ir.parts import bundled
from accel.ir.recipe import Recipe
from accel.runtime.decode.context import DecodeContext
from accel.runtime.length.fixed import Fixed
from accel.runtime.loop.speculative import Speculative


def by_chance(part: Path, folder: Path, names: tuple[str, ...]) -> Path:
    """The same part, of which some tensors are numbers by chance, as large."""
    with safe_open(part, "pt") as opened:
        about = {n: v for n, v in opened.metadata().items() if n != "digest"}
    generator, tensors = torch.Generator().manual_seed(0), load_file(part)
    for name in names:
        one = tensors[name]
        tensors[name] = one.std() * torch.randn(one.shape, generator=generator)
    file = folder / f"{'-'.join(names)}.safetensors"
    save_file(tensors, file, about)
    return file


def drafted(
    model: Any, prompts: list[Any], tokens: int, most: int, passes: int
) -> tuple[list[Any], float, float]:
    """The rows' tokens, how many a call gave that checked a draft, and layers for each of them. passes: of a draft; 0:
    one for each token.
    """
    draft = model.decoding()[1].methods["draft"]
    rule = Axis("verify", "accel.runtime.verify").build("sample-match")
    tree = Axis("tree", "accel.runtime.tree").build("chain")
    methods = {"draft": draft, "verify": rule, "tree": tree, "length": Fixed(most)}
    context, found, counts = DecodeContext(methods, None, model), list[Any](), np.zeros(3)
    for first in range(0, len(prompts), BATCH):
        rows = rows_of(prompts[first : first + BATCH], tokens)
        with model.session(len(rows)) as session:
            for _ in Speculative().tokens(session, rows, context):
                pass
        found += [row.tokens for row in rows]
        for row in rows:
            counts += [row.drafting[n] for n in ("rounds", "accepted", "drafted")]
    layers = draft.layers(context)
    rounds, accepted, tries = counts
    calls = rounds * passes or tries
    given = rounds + accepted
    return found, given / rounds, (rounds * layers.size + calls * layers.sum()) / given


def main(
    text: Path,
    part: Path | None = None,
    prompts: int = 16,
    size: int = 64,
    tokens: int = 64,
    draft: int = 5,
) -> None:
    """Print a line for each way to draft."""
    print("| draft | tokens a check | layers a token | equal |\n|---|---:|---:|---|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        file, trained = Path(folder), part or bundled("s3d")
        masks = {"use": "s3d", "trained": str(trained)}
        chance = {n: str(by_chance(trained, file, names)) for n, names in CHANCE.items()}
        ways: dict[str, tuple[dict[str, Any], int]] = {
            "`s3d`": (masks, 1),
            **{f"`s3d`, {n}": ({**masks, "trained": f}, 1) for n, f in chance.items()},
            "`s3d`, no masks": ({"use": "s3d", "masks": 0}, 0),
            "`s3d-midskip`": ({"use": "s3d-midskip"}, 0),
        }
        for name, (table, passes) in ways.items():
            recipe = Recipe.load({"draft": table, "verify": {"use": "sample-match"}})
            with accel.optimize(MODEL, recipe, max_context=1024, max_batch=BATCH) as built:
                assert built.tokenizer is not None, "the model reads text"
                read = text.read_text(encoding="utf-8", errors="ignore")
                ids = np.array(built.tokenizer.encode(read))
                starts = np.linspace(0, ids.size - size, prompts).astype(int)
                parts = [ids[start : start + size] for start in starts]
                want = plain(built, parts, tokens)
                found, each, layers = drafted(built, parts, tokens, draft, passes)
                same = sum(a == b for a, b in zip(found, want, strict=True))
                line = f"| {name} | {each:.2f} | {layers:.1f} | {same} of {len(want)} |"
                print(line, flush=True)


CHANCE = {
    "masks by chance": ("all.rows",),
    "masks and product by chance": ("all.rows", "all.down", "all.up"),
}

if __name__ == "__main__":
    typer.run(main)
