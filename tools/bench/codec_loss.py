"""What a stored cache loses on a model's own keys: KL to the exact cache, teacher-forced behind a prompt of text.

    python tools/bench/codec_loss.py MODEL [--recipes kivi-2,gear,qaq] [--context 600] [--tokens 64] [--keys 20]
    python tools/bench/codec_loss.py MODEL --recipes kivi-2+group=32,kvquant+bits=2+first=4

`NAME+OPTION=VALUE` is a recipe with other options of its `kv.codec`. The model is captured once; tables that a recipe
lacks are measured. The prompt goes through a session as a user's does, so what a recipe stores once it is whole is
stored; then each of the next tokens of the text is a call of its own. One row: bits of a stored number, steps, outliers
and places included, of a `kv.codec`; mean and 90 % quantile of the KL per token, the share of tokens whose likeliest
next one is the same; with `--keys`, how many of so many pass keys are found in some 930 tokens (`--sentences`), of
prompts behind the first `--skip`, which options were chosen by; and bytes of the cache at the end.
"""

from __future__ import annotations

import argparse
import heapq
import inspect
import statistics
import sys
import tempfile
import tomllib
import warnings
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from turns import head, row

sys.path.append(str(Path(__file__).resolve().parents[1] / "pages"))
from needles import key_prompts, right

from accel.compiler.build_options import BuildOptions
from accel.compiler.load.source import open_source
from accel.compiler.optimize import build_captured
from accel.ir.capture.capture import capture
from accel.ir.errors import AccelError, InputError
from accel.ir.program import DTYPES
from accel.ir.recipe import Recipe
from accel.ir.state import CacheRegion, Part
from accel.runtime.model.compiled import CompiledModel

RECIPES = "kv-int8,kv-fp8,kivi-4,kivi-2,gear,zipcache,qaq,mikv,mustafar,minicache,kv-adaquant"
CODEC = "kv.codec"
KEY_ROOM = 1200  # tokens that a prompt with a pass key takes, with its answer, at most
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


def with_options(case: str) -> Recipe:
    """`NAME+OPTION=VALUE`, the value as in TOML. Raises InputError."""
    name, *options = case.split("+")
    recipe = Recipe.load(name)
    tables: dict[str, dict[str, Any]] = {axis: dict(x) for axis, x in recipe.tables.items()}
    for one in options:
        option, equals, value = one.partition("=")
        if not equals or CODEC not in tables:
            raise InputError(f"{case}: give NAME+OPTION=VALUE of a recipe with {CODEC}")
        try:
            tables[CODEC][option] = tomllib.loads(f"value = {value}")["value"]
        except tomllib.TOMLDecodeError as error:
            raise InputError(f"{case}: {one}: {error}; write the value as TOML does") from None
    return Recipe(name, tables=tables) if options else recipe


def numbers(model: CompiledModel) -> int:
    """Of the keys and values of one token, all layers together; of a model without a codec."""
    assert model.artifact is not None
    shapes = [s.shape for s in model.artifact.state if s.part in (Part.KEYS, Part.VALUES)]
    return sum(int(shape[1]) * int(shape[3]) for shape in shapes)


def bits(model: CompiledModel, recipe: Recipe, of: int) -> str:
    """Of one of so many numbers, in the parts of a codec; of other recipes nothing."""
    if CODEC not in recipe.tables:
        return "–"
    assert model.artifact is not None
    flush = 0 if model.facts.kv is None else model.facts.kv.flush
    stored = [
        s
        for s in model.artifact.state
        if s.part in (Part.KEYS, Part.VALUES) and (not flush or s.region is CacheRegion.KEPT)
    ]
    size = sum(
        DTYPES[s.dtype].itemsize * prod(map(int, (s.shape[1], *s.shape[3:]))) for s in stored
    )
    return f"{8 * size / (max(1, flush) * of):.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, help="a folder or GGUF file")
    parser.add_argument("--recipes", default=RECIPES)
    parser.add_argument("--context", type=int, default=600, help="tokens of the prompt")
    parser.add_argument("--tokens", type=int, default=64, help="tokens behind it")
    parser.add_argument("--text", type=Path, help="a file; else the source of heapq")
    parser.add_argument("--keys", type=int, default=0, help="prompts that hide a pass key")
    parser.add_argument("--skip", type=int, default=0, help="prompts to leave out before them")
    parser.add_argument("--sentences", type=int, default=100, help="that hide it")
    options = parser.parse_args()
    if min(options.context, options.tokens) < 1:
        parser.error("--context and --tokens take 1 or more")
    if min(options.skip, options.keys) < 0:
        parser.error("--keys and --skip take 0 or more")
    warnings.filterwarnings("ignore")
    text = options.text.read_text(encoding="utf-8") if options.text else inspect.getsource(heapq)
    most = options.context + options.tokens
    room = max(most, KEY_ROOM * bool(options.keys))
    source = open_source(options.model)
    loaded = source.load()
    assert source.tokenizer is not None
    ids = list(source.tokenizer.encode(text))[:most]
    if len(ids) < most:
        parser.error(f"the text has {len(ids)} tokens; give one of {most}, or less context")
    prompts = key_prompts(options.skip + options.keys, options.sentences)[options.skip :]
    program = capture(loaded.model, max_context=room, stored=loaded.stored)
    build = BuildOptions(max_context=room, verify=False, train=True)
    want: Rows | None = None
    of = 0
    head(
        "cache",
        ">bits",
        ">KL, mean",
        ">90 %",
        ">same best token",
        f">keys of {options.keys}",
        ">MB",
    )
    for name in ["base", *options.recipes.split(",")]:
        with tempfile.TemporaryDirectory() as place:
            try:
                recipe = with_options(name)
                model = build_captured(
                    program, recipe, build, source.tokenizer, Path(place) / "out"
                )
            except AccelError as error:
                row(f"`{name}`: refused, {' '.join(str(error).split())}", *[""] * 6)
                continue
            with model:
                found, size = log_odds(model, ids, options.context)
                keys = right(model, prompts)
                of = of or numbers(model)
                told = bits(model, recipe, of)
        want = found if want is None else want
        mean, late, same = loss(want, found)
        row(
            f"`{name}`", told, f"{mean:.4f}", f"{late:.4f}", f"{same:.2f}", keys, f"{size / 1e6:.1f}"
        )  # fmt: skip


if __name__ == "__main__":
    main()
