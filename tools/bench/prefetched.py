"""How many of the rows that a token would read exactly were asked for before it came (`specache`).

    python tools/bench/prefetched.py MODEL --prompt 1000 --tokens 64

Behind so many tokens of a text the model goes on, greedily and by draws at temperature 1, a guess beside each token.
A token reads the rows that its guess asked for, one step before. Counted are, of the rows that the token itself then
asks for in each layer and KV head, those that are among these, and among those of the token before it.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated, Any
from unittest.mock import patch

import numpy as np
import typer

import accel
from accel.compiler.build_options import BuildOptions
from accel.compiler.load.source import open_source
from accel.compiler.optimize import build_captured
from accel.compiler.part_text import text_ids
from accel.ir.capture.capture import capture
from accel.ir.recipe import Recipe
from accel.passes.kv.select._tokens import RING
from accel.runtime.session.session import Session

Rows = dict[str, list[set[int]]]  # of each layer, of each KV head


class Counts:
    """What calls of a token and its guess leave."""

    def __init__(self, heads: int) -> None:
        self.heads = heads
        self.guess: tuple[int, Rows, Rows] | None = (
            None  # its token, what it asked for, and the token before
        )
        self.right: list[bool] = []
        self.shares: list[tuple[float, float]] = []

    def asked(self, session: Session, position: int) -> Rows:
        held = session._core.backend.buffers()
        found = {n: a for n, a in held.items() if n.startswith("choice.") and n.endswith(".rows")}
        return {
            n: [{r for r in head if r >= 0} for head in a[0, position % RING].reshape(self.heads, -1).tolist()]
            for n, a in found.items()
        }  # fmt: skip

    def see(self, session: Session, tokens: Any) -> None:
        """After a call [1,2] of a token and a guess."""
        at = int(session.lengths[0]) - 2
        own = self.asked(session, at)
        if self.guess is not None:
            token, fetched, before = self.guess
            self.right.append(token == int(tokens[0, 0]))
            self.shares.append((share(own, fetched), share(own, before)))
        self.guess = int(tokens[0, 1]), self.asked(session, at + 1), own


def share(own: Rows, other: Rows) -> float:
    """Of rows, how many are among others."""
    pairs = [(a, b) for n in own for a, b in zip(own[n], other[n], strict=True)]
    return sum(len(a & b) for a, b in pairs) / sum(len(a) for a, _ in pairs)


def main(
    model: Path,
    prompt: Annotated[int, typer.Option(min=64, help="Tokens of the text.")] = 1000,
    tokens: Annotated[int, typer.Option(min=8, help="That the model makes.")] = 64,
    texts: Annotated[int, typer.Option(min=1, help="Texts.")] = 2,
) -> None:
    """Print a table."""
    source = open_source(model)
    assert source.tokenizer is not None
    ids = text_ids(source.tokenizer, None, prompt).numpy()
    loaded, most = source.load(), prompt + tokens + 64
    program = capture(loaded.model, max_context=most, stored=loaded.stored)
    with tempfile.TemporaryDirectory() as folder:
        out, options = Path(folder) / "built", BuildOptions(max_context=most, verify=False)
        build_captured(program, Recipe.load("specache"), options, source.tokenizer, out).close()
        run = Session.run
        columns = ["", "tokens", "guesses right", "rows fetched before, of all", "… right guesses"]
        columns += ["… wrong ones", "asked by the token before"]
        print(f"| {' | '.join(columns)} |")
        print(f"|---|{'---:|' * 6}")
        with accel.load(out, threads=1) as one:
            heads = one.facts.layers[0].num_kv_heads
            for name, temperature in (("greedy", 0.0), ("drawn", 1.0)):
                seen = Counts(heads)

                def watched(
                    self: Session, given: Any, *rest: Any, seen: Counts = seen, **more: Any
                ) -> Any:
                    found = run(self, given, *rest, **more)
                    if np.shape(given)[1] == 2:
                        seen.see(self, given)
                    return found

                for i in range(texts):
                    seen.guess = None
                    asked = ids[i * prompt : (i + 1) * prompt].tolist()
                    with patch.object(Session, "run", watched):
                        one.generate([asked], tokens, temperature=temperature, seed=i, eos=[])
                right, told = np.array(seen.right), np.array(seen.shares)
                parts = [told[:, 0], told[right, 0], told[~right, 0], told[:, 1]]
                cells = [f"{x.mean():.3f}" if len(x) else "–" for x in parts]
                print(
                    f"| {name} | {len(right)} | {right.sum()} | {' | '.join(cells)} |", flush=True
                )


if __name__ == "__main__":
    typer.run(main)
