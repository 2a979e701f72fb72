"""What a stored cache loses on a model's own keys: KL to the exact cache, teacher-forced behind a prompt of text.

    python tools/bench/codec_loss.py MODEL [--recipes kivi-2,gear,qaq] [--context 600] [--tokens 64]

The prompt goes through a session as a user's does, so what a recipe stores once it is whole is stored; then each of the
next tokens of the text is a call of its own. One row: mean and 90 % quantile of the KL per token, the share of tokens
whose likeliest next one is the same, and bytes of the cache at the end.
"""

from __future__ import annotations

import argparse
import heapq
import inspect
import statistics
import warnings
from pathlib import Path

import numpy as np
import numpy.typing as npt
from turns import head, row

import accel
from accel.ir.errors import AccelError
from accel.runtime.model.compiled import CompiledModel

RECIPES = "kv-int8,kv-fp8,kivi-4,kivi-2,gear,zipcache,qaq,mikv,mustafar,minicache,kv-adaquant"
Rows = npt.NDArray[np.float64]


def log_odds(model: CompiledModel, ids: list[int], context: int) -> tuple[Rows, int]:
    """Log-probabilities [N,V] of what follows the prompt and each token behind it; bytes of the cache at the end."""
    with model.session() as session:
        rows = [session.prompt(np.array([ids[:context]]))[0, -1]]
        rows += [session.run([[token]])[0, -1] for token in ids[context:-1]]
        size = int(session.stats["kv_bytes"])
    logits = np.stack(rows).astype(np.float64)
    logits -= logits.max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True)), size


def loss(want: Rows, found: Rows) -> tuple[float, float, float]:
    """The mean of the KL per token, its 90 % quantile, and the share of tokens with the same best one."""
    each = (np.exp(want) * (want - found)).sum(-1)
    same = float((want.argmax(-1) == found.argmax(-1)).mean())
    return statistics.fmean(each), float(np.quantile(each, 0.9)), same


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a folder or GGUF file")
    parser.add_argument("--recipes", default=RECIPES)
    parser.add_argument("--context", type=int, default=600, help="tokens of the prompt")
    parser.add_argument("--tokens", type=int, default=64, help="tokens behind it")
    parser.add_argument("--text", type=Path, help="a file; else the source of heapq")
    options = parser.parse_args()
    if min(options.context, options.tokens) < 1:
        parser.error("--context and --tokens take 1 or more")
    warnings.filterwarnings("ignore")
    text = options.text.read_text(encoding="utf-8") if options.text else inspect.getsource(heapq)
    most = options.context + options.tokens
    want: Rows | None = None
    head("cache", ">KL, mean", ">90 %", ">same best token", ">MB")
    for name in ["base", *options.recipes.split(",")]:
        try:
            model = accel.optimize(options.model, name, max_context=most, verify=False)
        except AccelError as error:
            row(f"`{name}`: refused, {' '.join(str(error).split())}", "", "", "", "")
            continue
        with model:
            assert model.tokenizer is not None
            ids = list(model.tokenizer.encode(text))[:most]
            if len(ids) < most:
                parser.error(f"the text has {len(ids)} tokens; give one of {most}, or less context")
            found, size = log_odds(model, ids, options.context)
        want = found if want is None else want
        mean, late, same = loss(want, found)
        row(f"`{name}`", f"{mean:.4f}", f"{late:.4f}", f"{same:.2f}", f"{size / 1e6:.1f}")


if __name__ == "__main__":
    main()
