"""What tuning a model changes: its perplexity, its answers, and how soon its Jacobi iterations end.

    python tools/bench/bench_tuned.py api/reference [DIR ...] [--windows 8] [--prompts 2] [--blocks 3] [--block 16]

Perplexity is over windows of held-out files; answers are greedy, to copies and look-ups. Passes are the calls of a
block until nothing changes, the last one included, over the six kinds of prompts; for each block the guesses begin as
tokens of the prompt. With `--loop '{"use": "lud"}'` it tells of answers by that loop alone, and of how many their
tokens are those of plain decoding. Counts, no times.
"""

from __future__ import annotations

import json
import math
import random
import sys
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import turns
import typer
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F

import accel
from accel.compiler.train.runs.cllm import iterates
from accel.compiler.train.source import Source
from accel.compiler.train.whole import Whole
from accel.reference import tasks
from accel.reference.kinds import KINDS, prompts

sys.path.insert(0, str(Path(__file__).parents[1] / "train"))
from reference_export import windows

ASKED, ROOM = ("copy", "key_value"), 24


def perplexity(folder: Path, rows: Tensor) -> float:
    """Of a folder's model, over rows [N,T+1]."""
    model = Whole(Source(folder, None, None, lambda *_: None, print).program)
    losses = [float(F.cross_entropy(model.logits(row[None, :-1])[0], row[1:])) for row in rows]
    return math.exp(float(np.mean(losses)))


def answered(model: Any, count: int) -> tuple[int, float, list[Any]]:
    """Exact answers, of `count` to each kind; tokens per call, but for the prompt's; the tokens of each answer."""
    right, tokens, calls, all_said = 0, 0, 0, list[Any]()
    for kind in ASKED:
        rng = random.Random(f"tuned {kind}")
        for _ in range(count):
            prompt, answer = tasks.make(kind, rng, 100)
            out = model.generate(prompt, max_new_tokens=ROOM)
            right += out.text[0].startswith(answer)
            tokens, calls = tokens + len(out.tokens[0]) - 1, calls + out.stats["calls"] - 1
            all_said += out.tokens
    return right, tokens / calls, all_said


def passes(model: Any, kind: str, count: int, blocks: int, block: int) -> float:
    """Of a block, over prompts of a kind."""
    found = list[int]()
    for number, text in enumerate(prompts(kind, count)):
        ids = np.array(model.tokenizer.encode(text), np.int64)
        with model.session() as session:
            said = iterates(session, ids, block, blocks, model.facts.eos, number)
        found += [len(states) for states in said]
    return float(np.mean(found))


def run(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR ...")],
    count: Annotated[int, typer.Option("--windows", min=1, help="Of held-out text.")] = 8,
    each: Annotated[int, typer.Option("--prompts", min=1, help="Of each kind.")] = 2,
    blocks: Annotated[int, typer.Option(min=1, help="Of each prompt.")] = 3,
    block: Annotated[int, typer.Option(min=2, help="Tokens of one.")] = 16,
    loop: Annotated[
        list[str] | None, typer.Option(metavar="TABLE", help="Of JSON, that answers.")
    ] = None,
) -> None:
    """A line for each model; or with loops, for each of them and each model."""
    if loop:
        turns.head("model", "loop", ">answers of 20", ">tokens per call", ">as plain decoding")
        for folder in folders:
            with accel.optimize(str(folder), {}, verify=False) as model:
                wanted = answered(model, 10)[2]
            for one in loop:
                tables = {"loop": json.loads(one)}
                with accel.optimize(str(folder), tables, verify=False) as model:
                    exact, each_call, said = answered(model, 10)
                same = sum(a == b for a, b in zip(said, wanted, strict=True))
                turns.row(folder.name, one, str(exact), f"{each_call:.2f}", str(same))
        return
    tokenizer = Tokenizer.from_file(str(turns.REFERENCE / "tokenizer.json"))
    held = windows(tokenizer)
    rows = held[:: max(1, len(held) // count)][:count]
    turns.head("model", ">perplexity", ">answers of 20", *(f">{kind}" for kind in KINDS), ">all")
    for folder in folders:
        loss = perplexity(folder, rows)
        with accel.optimize(str(folder), {}, verify=False) as model:
            exact = answered(model, 10)[0]
            found = [passes(model, kind, each, blocks, block) for kind in KINDS]
        cells = [f"{value:.2f}" for value in (*found, float(np.mean(found)))]
        turns.row(folder.name, f"{loss:.2f}", str(exact), *cells)


if __name__ == "__main__":
    typer.run(run)
