"""How much of what heads draft stands, on a text that they did not learn from, with equal drafts and no guard.

    python tools/bench/bench_heads.py TEXT [--model DIR] [--head DIR ...] [--prompts 24] [--size 64] [--tokens 64]

Each prompt is the beginning of another part of TEXT, and the model goes on greedily. Every head drafts chains of four
tokens in each round, and trees of 25. Printed are the tokens that stand for each call that checks drafts, the one that
comes anyway included, and whether all tokens are those of plain decoding.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

import accel
from accel.ir.axis import Axis
from accel.ir.recipe import Recipe
from accel.reference.tasks import __file__ as reference
from accel.runtime.decode.context import DecodeContext
from accel.runtime.decode.row import Row
from accel.runtime.length.fixed import Fixed
from accel.runtime.loop.autoregressive import Autoregressive
from accel.runtime.loop.speculative import Speculative
from accel.runtime.sample.standard import Standard

BATCH, CHAIN, TREE = 8, 4, 25
MODEL = Path(reference).parent
BUNDLED = ("eagle1", "dovetail", "eagle3", "glide", "longspec", "moa-spec", "medusa", "bpd")
RESCORED: tuple[dict[str, float], ...] = (  # one path, without n-grams and with; several
    {"paths": 1, "alpha": 0.0},
    {"paths": 1},
    {"alpha": 0.0},
    {},
)
SHAPES: dict[str, dict[str, tuple[dict[str, float], ...]]] = {
    "eagle1": {"chain": ({},), "eagle-tree": ({},)},
    "dovetail": {"chain": ({},), "eagle-tree": ({},)},
    "eagle3": {"chain": ({},), "eagle-tree": ({},)},
    "glide": {"chain": ({},), "eagle-tree": ({},)},
    "longspec": {"chain": ({},), "eagle-tree": ({},)},
    "moa-spec": {"chain": ({},), "eagle-tree": ({},)},
    "medusa": {"chain": ({},), "static": ({},), "bpd-rescore": RESCORED, "eagle-tree": ({},)},
    "bpd": {"chain": ({},), "bpd-rescore": RESCORED, "eagle-tree": ({},)},
}


def rows_of(prompts: list[Any], tokens: int) -> list[Row]:
    """Greedy rows."""
    rng = np.random.default_rng(0)
    return [Row(one, Standard(), rng, limit=tokens, max_context=1024) for one in prompts]


def drafted(model: Any, tree: Any, prompts: list[Any], tokens: int) -> tuple[list[Any], float]:
    """The rows' tokens, and how many a call gave that checked a draft."""
    draft = model.decoding()[1].methods["draft"]
    rule = Axis("verify", "accel.runtime.verify").build("sample-match")
    methods = {"draft": draft, "verify": rule, "tree": tree}
    methods["length"] = Fixed(TREE if tree.branches else CHAIN)
    found, rounds, stood = list[Any](), 0, 0
    for first in range(0, len(prompts), BATCH):
        rows = rows_of(prompts[first : first + BATCH], tokens)
        with model.session(len(rows)) as session:
            for _ in Speculative().tokens(session, rows, DecodeContext(methods, None, model)):
                pass
        found += [row.tokens for row in rows]
        rounds += sum(row.drafting["rounds"] for row in rows)
        stood += sum(row.drafting["accepted"] for row in rows)
    return found, 1 + stood / rounds


def plain(model: Any, prompts: list[Any], tokens: int) -> list[Any]:
    """The tokens without drafts."""
    found = list[Any]()
    for first in range(0, len(prompts), BATCH):
        rows = rows_of(prompts[first : first + BATCH], tokens)
        with model.session(len(rows)) as session:
            for _ in Autoregressive().tokens(session, rows, DecodeContext()):
                pass
        found += [row.tokens for row in rows]
    return found


def main(
    text: Path,
    model: Path = MODEL,
    head: Annotated[list[Path] | None, typer.Option()] = None,
    prompts: int = 24,
    size: int = 64,
    tokens: int = 64,
) -> None:
    """Print a line for each head and shape."""
    heads = head or [MODEL / name for name in BUNDLED]
    print("| head | tree | tokens a check | equal |\n|---|---|---|---|", flush=True)
    for folder in heads:
        plan = {"tree": {"use": "static"}, "verify": {"use": "sample-match"}}
        recipe = Recipe.load({"draft": {"use": _method(folder), "path": str(folder)}, **plan})
        with accel.optimize(model, recipe, max_context=1024, max_batch=BATCH) as built:
            tokenizer = built.tokenizer
            assert tokenizer is not None, "the model reads text"
            ids = np.array(tokenizer.encode(text.read_text(encoding="utf-8", errors="ignore")))
            starts = np.linspace(0, ids.size - size, prompts).astype(int)
            parts = [ids[start : start + size] for start in starts]
            want = plain(built, parts, tokens)
            for shape, tables in SHAPES[_method(folder)].items():
                for table in tables:
                    tree = Axis("tree", "accel.runtime.tree").build(shape, **table)
                    found, each = drafted(built, tree, parts, tokens)
                    same = sum(a == b for a, b in zip(found, want, strict=True))
                    told = " ".join([f"`{shape}`", *(f"{n} = {v:g}" for n, v in table.items())])
                    line = f"| `{folder.name}` | {told} | {each:.2f} | {same} of {len(want)} |"
                    print(line, flush=True)


def _method(folder: Path) -> str:
    """The drafter of a head."""
    from accel.compiler.load.heads._folder import head_at

    found = head_at(folder)
    assert found is not None, f"{folder} holds no head"
    return found.format.method


if __name__ == "__main__":
    typer.run(main)
