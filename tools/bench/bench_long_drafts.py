"""What self-drafts over a long context give on a real model: `magicdec`, `quantspec`, against plain steps.

    python tools/bench/bench_long_drafts.py MODEL TEXT [--recipe quantspec ...] [--context 4096 ...] [--drafted 3 ...]
        [--tokens 48] [--repeat 3]

Greedy, one row, whose prompt are the first tokens of a text. The prompt runs once for each context; plain and drafting
runs begin behind it and alternate, without a guard. Times are of a token, from the first round on, in which a second
cache is filled. The last columns are a step that plain decoding takes and its ratio to drafting, the median of pairs.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np
import typer
from turns import head, row

import accel
from accel.ir.axis import find_axes
from accel.runtime.decode.context import DecodeContext
from accel.runtime.decode.row import Row
from accel.runtime.loop.autoregressive import Autoregressive
from accel.runtime.loop.speculative import Speculative
from accel.runtime.model.compiled import CompiledModel
from accel.runtime.sample.standard import Standard


def run(
    model: Annotated[str, typer.Argument(help="A model directory or a GGUF file.")],
    text: Annotated[Path, typer.Argument(help="A file of text.")],
    recipe: Annotated[list[str] | None, typer.Option(help="Names or TOML files.")] = None,
    context: Annotated[list[int] | None, typer.Option(min=64, help="Tokens of a prompt.")] = None,
    drafted: Annotated[list[int] | None, typer.Option(min=1, help="Tokens of a draft.")] = None,
    tokens: Annotated[int, typer.Option(min=8, help="New tokens.")] = 48,
    repeat: Annotated[int, typer.Option(min=1, help="Pairs of runs.")] = 3,
) -> None:
    """A line for each recipe, context and length of drafts."""
    contexts, lengths = context or [4096], drafted or [3]
    head("recipe", "context", "drafted", "stand", "tokens of a check", "plain, ms", "speed", "load")
    for name in recipe or ["quantspec", "magicdec"]:
        most = max(contexts) + tokens + 16
        with accel.optimize(model, name, max_context=most, verify=False) as built:
            assert built.tokenizer is not None
            ids = np.array(built.tokenizer.encode(text.read_text(encoding="utf-8")), np.int64)
            for size in contexts:
                assert ids.size >= size, f"{text} has {ids.size} tokens"
                for length, one in _runs(built, ids[:size], lengths, tokens, repeat).items():
                    ratios = f"{median(one['ratios']):.2f} ({min(one['ratios']):.2f}–{max(one['ratios']):.2f})"
                    stand = f"{one['accepted'] / max(1, one['drafted']):.0%}"
                    given = f"{one['tokens'] / max(1, one['rounds']):.2f}"
                    plain = f"{1e3 * median(one['plain']):.1f}"
                    load = f"{os.getloadavg()[0]:.1f}"
                    row(Path(name).stem, size, length, stand, given, plain, ratios, load)


def _runs(
    model: CompiledModel, ids: np.ndarray[Any, Any], lengths: list[int], tokens: int, repeat: int
) -> dict[int, dict[str, Any]]:
    """Of each length of drafts: figures of pairs of runs behind one prompt."""
    axes, found = find_axes(), dict[int, dict[str, Any]]()
    with model.session() as session:
        session.prompt(ids[None, :-1])
        for length in lengths:
            methods: dict[str, Any] = {
                "draft": model.decoding()[1].methods["draft"],
                "verify": axes["verify"].build("sample-match"),
                "tree": axes["tree"].build("chain"),
                "length": axes["length"].build("fixed", tokens=length),
            }
            drafting = DecodeContext(methods, None, model)
            one: dict[str, Any] = {"ratios": [], "plain": []}
            for turn in range(repeat):
                spent = dict[bool, float]()
                for drafts in (False, True) if turn % 2 else (True, False):
                    rows = [
                        Row(
                            ids,
                            Standard(),
                            np.random.default_rng(0),
                            limit=tokens,
                            max_context=1 << 20,
                        )
                    ]
                    loop = Speculative() if drafts else Autoregressive()
                    pairs = loop.tokens(session, rows, drafting if drafts else DecodeContext())
                    spent[drafts] = _seconds(pairs, rows[0])
                    if drafts:
                        one |= {n: rows[0].drafting[n] for n in ("drafted", "accepted", "rounds")}
                        one["tokens"] = len(rows[0].tokens) - 1
                    session.rewind(ids.size - 1)
                one["ratios"].append(spent[False] / spent[True])
                one["plain"].append(spent[False])
            found[length] = one
    return found


def _seconds(pairs: Any, row: Row) -> float:
    """Of a token, behind the first round."""
    next(pairs)
    next(pairs)
    start, known = time.perf_counter(), len(row.tokens)
    for _ in pairs:
        pass
    return (time.perf_counter() - start) / max(1, len(row.tokens) - known)


if __name__ == "__main__":
    typer.run(run)
