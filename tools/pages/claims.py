"""What papers claim of methods that evict, select or encode, on the bundled model beside the controls: Markdown tables.

    python tools/pages/claims.py                    every claim
    python tools/pages/claims.py scope headkv-r2    some

Each row is a recipe's tables. A row of the same budget differs in the one thing that the claim is about. Columns: KL
to the whole cache along held-out text (`leaderboard_measure.quality`), and exact answers to its `questions`, of prompts
of about 500 and 1000 tokens. With `later`, so many tokens of text come between a prompt and its question.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.append(str(Path(__file__).resolve().parents[1] / "train"))
import leaderboard_measure as measure
from captured import over_state
from leaderboard import CONTEXT, Case, build
from reference_data import REFERENCE
from safetensors import safe_open
from safetensors.torch import save_file

import accel
from accel.compiler.build_options import BuildOptions
from accel.compiler.choose.builds import Builds
from accel.compiler.load.checkpoint import load_model
from accel.ir.capture.capture import capture
from accel.passes.kv._shared.tables import observed
from accel.runtime.model.compiled import CompiledModel

TITLES = ("# question\n", "# look up\n", "# copy\n")  # where the question of a task begins
Tables = dict[str, dict[str, Any]]
Order = Callable[[list[float], random.Random], list[float]]


@dataclass(frozen=True)
class Row:
    """A recipe. shuffled: an axis whose bundled table of heads or layers gets another order.

    question: whether sessions are told where it begins. units: the tokens of a line that are one unit; "lines", or
    "halves", as long but shifted by half a line. later: tokens between a prompt and its question.
    """

    told: str
    tables: Tables
    shuffled: str = ""
    question: bool = False
    units: str = ""
    later: int = 0
    text: bool = True  # whether KL is measured


def evict(use: str, kept: int, *, more: Tables | None = None, **score: Any) -> Tables:
    """Tables of a score whose heads keep so many tokens, and of other axes."""
    budget = {"use": "uniform", "tokens_kept": kept}
    return {"kv.score": {"use": use, **score}, "kv.budget": budget, **(more or {})}


def _phases(prompt: int, generated: int) -> Tables:
    budget = {"use": "phases", "tokens_kept": prompt, "decode_kept": generated, "recent": 32}
    return {"kv.budget": budget, "kv.when": {"use": "generated", "tokens": 16}}


def _scope() -> Iterator[Row]:
    later, whole = 384, 1024
    yield Row("the whole cache", {}, later=later, text=False)
    scope = {"kv.refine": {"use": "scope", "recent": 32}}
    for prompt, told in ((whole, "the whole prompt"), (256, "256 of the prompt")):
        tables = evict("snapkv", 0, more={**scope, **_phases(prompt, 64)})
        yield Row(f"`scope`, {told} and 64 generated", tables, later=later, text=False)
        both = prompt + 64 if prompt < whole else 560  # prompts have about 500 tokens
        for use in ("snapkv", "h2o", "streaming-llm", "kv-random"):
            when = {"kv.when": {"use": "generated", "tokens": 16}}
            yield Row(
                f"`{use}`, {both} of all", evict(use, both, more=when), later=later, text=False
            )


def _shotkv() -> Iterator[Row]:
    more = {"kv.refine": {"use": "shotkv"}, **_phases(256, 1024)}
    tables = evict("snapkv", 0, more=more, kernel=1)
    yield Row("`shotkv`, lines as units", tables, units="lines")
    yield Row("… units that cut lines in two", tables, units="halves")
    yield Row("`snapkv`, `kernel` 1", evict("snapkv", 256, kernel=1))
    yield Row("`snapkv`", evict("snapkv", 256))
    yield Row("`chunkkv`", evict("snapkv", 256, more={"kv.refine": {"use": "chunkkv"}}))
    yield Row("`kv-random`", evict("kv-random", 256))


def _finch() -> Iterator[Row]:
    moved = {"kv.keep": {"use": "key-rerotate"}}
    kept = 256
    yield Row("`finch`, the question marked", evict("finch", kept, more=moved), question=True)
    yield Row("… at its old positions", evict("finch", kept), question=True)
    yield Row(
        "… a share of each chunk of 128", evict("finch", kept, more=moved, chunk=128), question=True
    )
    yield Row("… the last 64 tokens", evict("finch", kept, more=moved))
    whole = {**moved, "kv.refine": {"use": "chunkkv"}}
    yield Row(
        "… whole chunks of 10 by it (`chunkkv`)", evict("finch", kept, more=whole), question=True
    )
    parts = {**whole, "kv.when": {"use": "chunk"}}
    yield Row("… after each 512 tokens", evict("finch", kept, more=parts), question=True)
    yield Row("… the last 64 tokens of each", evict("finch", kept, more=parts))
    for use in ("snapkv", "streaming-llm", "kv-random"):
        yield Row(f"`{use}`", evict(use, kept))


def _headkv() -> Iterator[Row]:
    score = {"kernel": 7, "pooling": "max"}
    for kept in (256, 128):
        own = {"kv.budget": {"use": "headkv-r2", "tokens_kept": kept}}
        yield Row(f"`headkv-r2`, {kept} on average", evict("snapkv", 0, more=own, **score))
        yield Row("… heads in another order", evict("snapkv", 0, more=own, **score), "kv.budget")
        yield Row("… each head as many (`snapkv`)", evict("snapkv", kept, **score))


def _duo() -> Iterator[Row]:
    own = {"kv.budget": {"use": "duo-heads", "share": 0.5, "sinks": 16, "recent": 64}}
    tables = evict("streaming-llm", 0, more=own, sinks=16)
    yield Row("`duo-heads`, half of the heads stream", tables)
    yield Row("… heads in another order", tables, "kv.budget")
    yield Row("… the other half", tables, "kv.budget reversed")
    yield Row("`streaming-llm`, all heads 540", evict("streaming-llm", 540, sinks=16))


def _prefixkv() -> Iterator[Row]:
    more = {"kv.refine": {"use": "chunkkv", "chunk": 1}, "kv.when": {"use": "prompt"}}
    for kept in (256, 128):
        for use, order in (
            ("prefixkv", ""),
            ("prefixkv", "kv.budget"),
            ("uniform", ""),
            ("pyramidkv", ""),
        ):
            told = f"`{use}`, {kept} on average" if not order else "… layers in another order"
            own = {"kv.budget": {"use": use, "tokens_kept": kept}}
            yield Row(told, evict("h2o", 0, more={**more, **own}, recent=1), order)
    for use in ("prefixkv", "uniform"):
        own = {"kv.budget": {"use": use, "tokens_kept": 256}}
        yield Row(f"`{use}`, 256, by `snapkv`", evict("snapkv", 0, more=own))


def _louiskv() -> Iterator[Row]:
    for boundary, told in (
        (2.0, "searched by each token"), (0.7, "at boundaries of 0.7"), (0.5, "at boundaries of 0.5"),
        (0.3, "at boundaries of 0.3"), (-2.0, "once"),
    ):  # fmt: skip
        tables = {"kv.select": {"use": "louiskv", "tokens_read": 128, "boundary": boundary}}
        yield Row(f"`louiskv`, {told}", tables)
    for use in ("clusterkv", "quest"):
        yield Row(f"`{use}`", {"kv.select": {"use": use, "tokens_read": 128}})
    yield Row("`streaming-llm`, 128", evict("streaming-llm", 128))


def _shadowkv() -> Iterator[Row]:
    """G D is 128 here."""
    shape = {"tokens_read": 96, "outliers": 3, "local": 1}
    for low_rank in (128, 80, 48, 24, 8):
        tables = {"kv.select": {"use": "shadowkv", **shape, "low_rank": low_rank}}
        yield Row(f"`shadowkv`, keys in {low_rank} of 128 directions", tables)
    yield Row("`quest`", {"kv.select": {"use": "quest", "tokens_read": 136, "page": 8}})


def _specache() -> Iterator[Row]:
    for bits in (1, 2):
        for rows in (0, 16, 64):
            tables = {"kv.select": {"use": "specache", "bits": bits, "tokens_read": rows}}
            yield Row(f"`specache`, {bits}-bit copy, {rows} rows as they are", tables)
    yield Row("`kivi`, 2 bits", _codec("kivi", residual=32))


def _codec(use: str, **options: Any) -> Tables:
    return {"kv.codec": {"use": use, **options}}


def _gear() -> Iterator[Row]:
    shape = {"group": 64, "residual": 64}
    yield Row("`kivi`, 2 bits, groups of 64: 2.5 bits", _codec("kivi", **shape))
    for told, rank, outliers in (
        ("rank 2 (GEAR-L): 3.5", 2, 0.0),
        ("2 % outliers: 3.3", 0, 0.02),
        ("both: 4.3", 2, 0.02),
    ):
        yield Row(f"… {told}", _codec("gear", **shape, low_rank=rank, outliers=outliers))
    yield Row("`kivi`, 2 bits, groups of 16: 4.0", _codec("kivi", group=16, residual=64))
    yield Row("`kivi`, 4 bits, groups of 64: 4.5", _codec("kivi", bits=4, **shape))


def _leank() -> Iterator[Row]:
    for ratio in (0.7, 0.5, 0.3):
        yield Row(
            f"`leank`, {ratio:.0%} of the channels of keys dropped", _codec("leank", ratio=ratio)
        )
    yield Row("`leank`, 70 %, what stays in 4 bits", _codec("leank", bits=4))
    for bits in (4, 2):
        yield Row(f"`kivi`, {bits} bits", _codec("kivi", bits=bits, group=64))


def _squat() -> Iterator[Row]:
    for bits in (2, 4):
        yield Row(f"`kivi`, {bits} bits, groups of 32", _codec("kivi", bits=bits))
        for weight in (0.0001, 0.001):
            told = f"… `squat`, lambda {weight:g}"
            yield Row(told, _codec("squat", bits=bits, weight=weight))


CLAIMS: dict[str, Callable[[], Iterator[Row]]] = {
    "scope": _scope, "shotkv": _shotkv, "finch": _finch, "headkv-r2": _headkv, "duo-heads": _duo,
    "prefixkv": _prefixkv, "louiskv": _louiskv, "shadowkv": _shadowkv, "specache": _specache, "gear": _gear,
    "leank": _leank, "squat": _squat,
}  # fmt: skip


def reordered(name: str, how: str, out: Path) -> Path:
    """The bundled table of a method whose heads, or layers where a layer has one list, are in another order."""
    with safe_open(REFERENCE / f"{name}.safetensors", "pt") as file:
        tensors, about = {n: file.get_tensor(n) for n in file.keys()}, file.metadata()
    rng = random.Random(0)
    layers = sorted({int(n.split(".")[0]) for n in tensors})
    if name == "prefixkv":
        order = rng.sample(layers, len(layers))
        found = {f"{a}.kept": tensors[f"{b}.kept"] for a, b in zip(layers, order, strict=True)}
    else:
        part = "place" if name == "duo-heads" else "share"
        flat = [float(x) for i in layers for x in tensors[f"{i}.{part}"]]
        flat = [1 - x for x in flat] if how.endswith("reversed") else rng.sample(flat, len(flat))
        found = dict(tensors)
        for i in layers:
            own, flat = flat[: len(tensors[f"{i}.{part}"])], flat[len(tensors[f"{i}.{part}"]) :]
            found[f"{i}.{part}"] = tensors[f"{i}.{part}"].new_tensor(own)
        if part == "share":
            each = [float(found[f"{i}.share"].mean()) for i in layers]
            found |= {f"{i}.shares": tensors[f"{i}.shares"].new_tensor(each) for i in layers}
    save_file({n: t.contiguous() for n, t in found.items()}, out, about)
    return out


def unlike(given: list[Any], boundaries: tuple[float, ...] = (0.7, 0.5, 0.3)) -> list[float]:
    """The share of tokens whose query is a boundary of `louiskv`, a mean over the layers, of the whole model."""
    loaded = load_model(REFERENCE)
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("claims", nargs="*", metavar="CLAIM", help=", ".join(CLAIMS))
    parser.add_argument("--windows", type=int, default=2)
    parser.add_argument("--prompts", type=int, default=2, help="of each task, length and depth")
    options = parser.parse_args()
    if wrong := [n for n in options.claims if n not in CLAIMS]:
        parser.error(f"no claim {wrong[0]!r}; there are {', '.join(CLAIMS)}")
    for name in ("windows", "prompts"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} is {getattr(options, name)}; give 1 or more")
    warnings.filterwarnings("ignore")
    with tempfile.TemporaryDirectory() as folder:
        builds, place = Builds(REFERENCE, BuildOptions(max_context=CONTEXT)), Path(folder)
        given = measure.windows(options.windows)
        between = [int(i) for i in given[0]]
        build(builds, Case("base"), place / "base")
        with accel.load(place / "base", threads=measure.THREADS) as base:
            odds = [measure.odds(base, ids) for ids in given]
        for claim in options.claims or CLAIMS:
            print(f"\n| {claim} | KL | recall | bytes, MB |\n|---|---:|---:|---:|", flush=True)
            for number, row in enumerate(CLAIMS[claim]()):
                tables = {axis: dict(table) for axis, table in row.tables.items()}
                if row.shuffled:
                    axis = row.shuffled.split()[0]
                    file = place / f"{claim}.{number}.safetensors"
                    tables[axis]["table"] = str(reordered(claim, row.shuffled, file))
                out = place / f"{claim}.{number}"
                build(builds, Case("base", tables=tables), out)
                with accel.load(out, threads=measure.THREADS) as model:
                    kl = f"{measure.quality(model, given, odds)['kl']:.4f}" if row.text else "–"
                    right = recall(model, row, options.prompts, between)
                    held = measure.kv_bytes(model) / 1e6
                told = ", ".join(f"{a} of {b} ({n})" for n, (a, b) in right.items())
                print(f"| {row.told} | {kl} | {told} | {held:.1f} |", flush=True)
            if claim == "louiskv":
                share = ", ".join(f"{x:.2f}" for x in unlike(given))
                print(f"\nof a token, a boundary of 0.7, 0.5, 0.3: {share}", flush=True)


if __name__ == "__main__":
    main()
