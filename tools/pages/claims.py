"""What papers claim of methods that evict, select or encode, on the bundled model beside the controls: Markdown tables.

    python tools/pages/claims.py                    every claim
    python tools/pages/claims.py scope headkv-r2    some

Each row is a recipe's tables; a claim is a function of a file in `claimed/`. A row of the same budget differs in the
one thing that the claim is about. Columns: KL to the whole cache and perplexity along held-out text
(`leaderboard_measure.quality`), exact answers to its `questions`, of prompts of about 500 and 1000 tokens, and what a
session holds after 1024. With `later`, so many tokens of text come between a prompt and its question.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import inspect
import pkgutil
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.append(str(Path(__file__).resolve().parents[1] / "train"))
import claimed
import leaderboard_measure as measure
from claim import Row, altered
from leaderboard import CONTEXT, Case, build
from reference_data import REFERENCE

import accel
from accel.compiler.build_options import BuildOptions
from accel.compiler.choose.builds import Builds
from accel.compiler.load.source import open_source
from accel.compiler.over_state import over_state
from accel.ir.axis import find_axes
from accel.ir.capture.capture import capture
from accel.ir.errors import AccelError
from accel.passes.kv._shared.tables import observed
from accel.runtime.model.compiled import CompiledModel

TITLES = ("# question\n", "# look up\n", "# copy\n")  # where the question of a task begins


def claims() -> dict[str, Callable[[], Iterator[Row]]]:
    """Claim -> its rows; a function of a file in `claimed/`, whose name is that of a method or says what it is of."""
    found: dict[str, Callable[[], Iterator[Row]]] = {}
    for info in pkgutil.iter_modules(claimed.__path__):
        module = importlib.import_module(f"claimed.{info.name}")
        for name, value in vars(module).items():
            if inspect.isfunction(value) and value.__module__ == module.__name__ and name[0] != "_":
                found[name.replace("_", "-")] = value
    return found


def unlike(given: list[Any], boundaries: tuple[float, ...] = (0.7, 0.5, 0.3)) -> list[float]:
    """The share of tokens whose query is a boundary of `louiskv`, a mean over the layers, of the whole model."""
    loaded = open_source(REFERENCE).load()
    program = over_state(capture(loaded.model, stored=loaded.stored))
    rows = torch.from_numpy(np.stack(given))
    (found,) = observed(program, [(rows, torch.ones(rows.shape[0], rows.shape[1] - 1))])
    like = [
        torch.cosine_similarity(x.queries[:, :, 1:], x.queries[:, :, :-1], dim=3).mean(1)
        for x in found.layers.values()
    ]
    return [float((torch.stack(like) < b).float().mean()) for b in boundaries]


def answered(model: CompiledModel, row: Row, text: str, answer: str, between: list[int]) -> bool:
    """Whether greedy decoding gives the answer exactly."""
    assert model.tokenizer is not None
    encode = lambda t: model.tokenizer.encode(t, special=False)  # noqa: E731
    at = max(text.rfind(title) for title in TITLES)
    lines = [encode(line) for line in text[:at].splitlines(keepends=True)]
    body, asked = [i for line in lines for i in line], encode(text[at:])
    prompt = body if row.later else body + asked
    with model.session() as session:
        marks: dict[str, Any] = {"question": len(body)} if row.question else {}
        if row.units:
            units = np.repeat(np.arange(len(lines)), [len(line) for line in lines])
            shift = len(lines[1]) // 2 if row.units == "halves" else 0
            marks["units"] = [*np.roll(units, shift)[:shift] * 0, *units[: len(units) - shift]]
            marks["units"] = [[*marks["units"], *[-1] * (len(prompt) - len(body))]]
        if marks:
            session.mark(**marks)
        logits = session.prompt(np.array([prompt]))
        for token in [*between[: row.later], *asked] if row.later else []:
            logits = session.run([[token]])
        want = encode(answer)
        for token in want:
            if int(logits[0, -1].argmax()) != token:
                return False
            logits = session.run([[token]])
    return True


def recall(
    model: CompiledModel, row: Row, prompts: int, between: list[int]
) -> dict[int, list[int]]:
    """Length of a prompt -> [right, asked]. With `later` of shorter ones only: the text between takes its place."""
    found: dict[int, list[int]] = {}
    for _, length, _, text, answer in measure.questions(prompts):
        if not row.later or length == min(measure.LENGTHS):
            cell = found.setdefault(length, [0, 0])
            cell[0] += answered(model, row, text, answer, between)
            cell[1] += 1
    return found


def tables_of(row: Row, out: Path) -> dict[str, dict[str, Any]]:
    """The row's tables; a part that it alters is written to `out`, and named."""
    tables = {axis: dict(table) for axis, table in row.tables.items()}
    if row.altered:
        axis, alter = row.altered
        method = tables[axis]["use"]
        options = {f.name for f in dataclasses.fields(find_axes()[axis].method(method))}
        name = "table" if "table" in options else "trained"
        tables[axis][name] = str(altered(method, alter, out))
    return tables


def cells(
    model: CompiledModel, row: Row, given: list[Any], odds: list[Any], prompts: int
) -> list[str]:
    """What is measured of a row: of one with `later` no text, since its question is what it is about."""
    right = recall(model, row, prompts, [int(i) for i in given[0]])
    found = measure.quality(model, given, odds) if not row.later else None
    return [
        f"{found['kl']:.4f}" if found else "–",
        f"{found['perplexity']:.2f}" if found else "–",
        *(str(right[length][0]) if length in right else "–" for length in measure.LENGTHS),
        f"{measure.kv_bytes(model) / 1e6:.1f}",
    ]


def main() -> None:
    every = claims()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("claims", nargs="*", metavar="CLAIM", help=", ".join(every))
    parser.add_argument("--windows", type=int, default=2)
    parser.add_argument("--prompts", type=int, default=2, help="of each task, length and depth")
    options = parser.parse_args()
    if wrong := [n for n in options.claims if n not in every]:
        parser.error(f"no claim {wrong[0]!r}; there are {', '.join(every)}")
    for name in ("windows", "prompts"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} is {getattr(options, name)}; give 1 or more")
    warnings.filterwarnings("ignore")
    asked = len(measure.TASKS) * measure.DEPTHS * options.prompts
    columns = ["KL", "perplexity", *(f"{n} tokens, of {asked}" for n in measure.LENGTHS), "MB"]
    with tempfile.TemporaryDirectory() as folder:
        builds, place = Builds(REFERENCE, BuildOptions(max_context=CONTEXT)), Path(folder)
        given = measure.windows(options.windows)
        build(builds, Case("base"), place / "base")
        with accel.load(place / "base", threads=measure.THREADS) as base:
            odds = [measure.odds(base, ids) for ids in given]
            whole = cells(base, Row("", {}), given, odds, options.prompts)
        for claim in options.claims or every:
            print(f"| {' | '.join(['', *columns])} |", flush=True)
            print("|---" + "|---:" * len(columns) + "|", flush=True)
            print(f"| {' | '.join(['the whole cache', *whole])} |", flush=True)
            for number, row in enumerate(every[claim]()):
                tables = tables_of(row, place / f"{claim}.{number}.safetensors")
                out = place / f"{claim}.{number}"
                try:
                    build(builds, Case("base", tables=tables), out)
                except AccelError as error:
                    reason = " ".join(str(error).split()).replace("|", "/")
                    print(f"| {row.told}: refused, {reason} |{' |' * len(columns)}", flush=True)
                    continue
                with accel.load(out, threads=measure.THREADS) as model:
                    found = cells(model, row, given, odds, options.prompts)
                print(f"| {' | '.join([row.told, *found])} |", flush=True)
                shutil.rmtree(out)
            if claim == "louiskv":
                share = ", ".join(f"{100 * x:.0f} %" for x in unlike(given))
                print(f"\nTokens that search at a boundary of 0.7, 0.5, 0.3: {share}.", flush=True)
            print(flush=True)


if __name__ == "__main__":
    main()
