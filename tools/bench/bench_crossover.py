"""From which context and batch on drafting over a small cache pays: magicdec on the bundled model, against plain steps.

    python tools/bench/bench_crossover.py [--context 256 ...] [--batch 1 ...] [--kept 64] [--drafted 3]
        [--weights int4] [--tokens 48] [--repeat 3] [--out FILE]

Greedy, over prompts of the bundled kinds that follow each other up to the context. Plain and drafting runs alternate;
the ratio is the median of pairs, of the times after the prompts. The guard is left out, so that what does not pay
shows. The last column is what the page's formula says of the share that stands and of the bytes that are read.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np
import typer
from turns import REFERENCE, head, row

import accel
from accel.ir.axis import find_axes
from accel.reference.kinds import KINDS, prompts
from accel.runtime.decode.context import DecodeContext
from accel.runtime.decode.row import Row
from accel.runtime.draft.magicdec import cost_of
from accel.runtime.loop.autoregressive import Autoregressive
from accel.runtime.loop.speculative import Speculative
from accel.runtime.model.compiled import CompiledModel
from accel.runtime.sample.standard import Standard


def run(
    context: Annotated[list[int] | None, typer.Option(min=64, help="Tokens of a prompt.")] = None,
    batch: Annotated[list[int] | None, typer.Option(min=1, help="Rows.")] = None,
    kept: Annotated[int, typer.Option(min=1, help="Tokens that drafts read of the context.")] = 64,
    drafted: Annotated[int, typer.Option(min=1, help="Tokens of a draft.")] = 3,
    weights: Annotated[str, typer.Option(help="Recipe of the weights.")] = "int4",
    tokens: Annotated[int, typer.Option(min=2, help="New tokens of each row.")] = 48,
    repeat: Annotated[int, typer.Option(min=1, help="Pairs of runs.")] = 3,
    out: Annotated[Path | None, typer.Option(help="A JSON file of the results.")] = None,
) -> None:
    """A line for each context and batch."""
    contexts, batches = context or [256, 768, 1536], batch or [1, 4, 8]
    recipe = {"draft": {"use": "magicdec", "tokens": kept}, "verify": {"use": "sample-match"}}
    found = []
    with accel.optimize(
        str(REFERENCE), [recipe, weights], max_batch=max(batches), verify=False
    ) as model:
        head("context", "batch", "times plain", "pairs", "accepted", "by formula")
        for size in contexts:
            for rows in batches:
                one = _pairs(model, _texts(model, size, rows), drafted, tokens, repeat)
                one |= {"context": size, "batch": rows, "kept": kept, "weights": weights}
                one["formula"] = _formula(model, one, drafted)
                found.append(one)
                low, high = min(one["ratios"]), max(one["ratios"])
                pairs, accepted = f"{low:.2f}–{high:.2f}", f"{one['accepted']:.0%}"
                row(size, rows, f"{one['ratio']:.2f}", pairs, accepted, f"{one['formula']:.2f}")
    if out is not None:
        out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def _texts(model: CompiledModel, size: int, rows: int) -> np.ndarray[Any, Any]:
    """Prompts [rows,size]: texts of all kinds, each row beginning with another one."""
    assert model.tokenizer is not None
    texts = [text for i in range(rows + 8) for kind in KINDS for text in prompts(kind, 1, seed=i)]
    found = []
    for first in range(rows):
        ids: list[int] = []
        for text in texts[first:]:
            ids += model.tokenizer.encode(text)
            if len(ids) >= size:
                break
        found.append(ids[:size])
    return np.array(found, np.int64)


def _pairs(
    model: CompiledModel, ids: np.ndarray[Any, Any], drafted: int, tokens: int, repeat: int
) -> dict[str, Any]:
    """Pairs of runs, after one that warms up: ratios of their times, and what the drafts came to."""
    axes = find_axes()
    methods: dict[str, Any] = {
        "draft": model._methods["draft"],
        "verify": axes["verify"].build("sample-match"),
        "tree": axes["tree"].build("chain"),
        "length": axes["length"].build("fixed", tokens=drafted),
    }
    drafting = DecodeContext(methods, None, model)
    ratios, figures = [], {"drafted": 0, "accepted": 0}
    for turn in range(repeat + 1):
        spent, said = dict[bool, float](), dict[bool, list[list[int]]]()
        for drafts in (False, True) if turn % 2 else (True, False):
            rows = [
                Row(prompt, Standard(), np.random.default_rng(0), limit=tokens, max_context=1 << 20)
                for prompt in ids
            ]
            loop = Speculative() if drafts else Autoregressive()
            with model.session(len(rows)) as session:
                pairs = loop.tokens(session, rows, drafting if drafts else DecodeContext())
                for _ in rows:  # the prompt's call gives the first of each
                    next(pairs)
                start = time.perf_counter()
                for _ in pairs:
                    pass
                spent[drafts] = time.perf_counter() - start
            said[drafts] = [row.tokens for row in rows]
            if drafts:
                figures = {n: sum(row.drafting[n] for row in rows) for n in figures}
        if turn:
            ratios.append(spent[False] / spent[True])
    return {
        "ratio": median(ratios),
        "ratios": ratios,
        "accepted": figures["accepted"] / max(1, figures["drafted"]),
        "equal": sum(a == b for a, b in zip(said[False], said[True], strict=True)),
    }


def _formula(model: CompiledModel, one: dict[str, Any], drafted: int) -> float:
    """Tokens of a round of a chain whose tokens stand with the accepted share's rate, over what it reads."""
    rate = _rate(one["accepted"], drafted)
    tokens = sum(rate**i for i in range(drafted + 1))
    each = cost_of(model.facts, one["context"], one["kept"], one["batch"])
    return tokens / (1 + drafted * each)


def _rate(accepted: float, drafted: int) -> float:
    """The probability with which each token of a chain stands, by the share of all drafted tokens that stand."""
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        share = sum(middle ** (i + 1) for i in range(drafted)) / drafted
        low, high = (middle, high) if share < accepted else (low, middle)
    return low


if __name__ == "__main__":
    typer.run(run)
