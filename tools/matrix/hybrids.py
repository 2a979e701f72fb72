"""What works on models with recurrent state: every type of the coverage table that carries some, in each way that needs
state to go back or to be shared.

    python tools/matrix/hybrids.py [TYPE…] [--target onnx] [--write]

Each type is a small model of random weights (`accel.compiler.smoke.tiny_models`). What a way gives is held to plain
decoding of the same build: the logits of recomputing to 1e-3 of the largest, or the same tokens, greedy and seeded.
Results are kept in build/hybrids.json; `--write` puts them into docs/figures/details/hybrids.md.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import PropertyMock, patch

import numpy as np

import accel
from accel.compiler.smoke.tiny_models import small_model
from accel.ir.errors import AccelError
from accel.runtime.decode.costs import Costs
from accel.runtime.serve.engine import Engine, Request
from accel.runtime.speculation.guard import Guard

ROOT = Path(__file__).resolve().parents[2]
COVERAGE = ROOT / "docs/figures/coverage.md"
RESULTS = ROOT / "build/hybrids.json"
TABLE = ROOT / "docs/figures/details/hybrids.md"
SIZES = {"max_context": 160, "max_batch": 4, "verify": False}
TOLERANCE = 1e-3
NEW = 16
BLOCK = 16  # tokens that are reused together where nothing recurs
SAMPLED = {"temperature": 1.0, "seed": 5}
Model = accel.CompiledModel
Asked = Mapping[str, Any]  # of `SamplingParams`
Make = Callable[..., Model]


def types() -> list[str]:
    """The model types whose layers carry recurrent state, by the coverage table."""
    lines = (line.split("|") for line in COVERAGE.read_text(encoding="utf-8").splitlines())
    return [
        c[1].strip()
        for c in lines
        if len(c) > 5 and "recurrent" in c[4] and c[2].strip() == "right"
    ]


def params(**asked: Any) -> accel.SamplingParams:
    return accel.SamplingParams(max_tokens=NEW, ignore_eos=True, **asked)


def tokens(model: Model, prompts: list[list[int]], asked: Asked) -> list[list[int]]:
    return model.generate(prompts, sampling_params=params(**asked)).tokens


def prompts(model: Model) -> list[list[int]]:
    """Two prompts with tokens that come again, of other lengths."""
    draw = np.random.default_rng(1)
    piece = draw.integers(3, model.facts.vocab_size, 9)
    return [np.tile(piece, 4)[:n].tolist() for n in (31, 20)]


def near(a: Any, b: Any) -> bool:
    return bool(np.abs(a - b).max() <= TOLERANCE * max(1.0, float(np.abs(b).max())))


def again(model: Model, ids: list[int]) -> Any:
    """The logits [1,1,V] after these tokens, of a session that knows nothing."""
    with model.session() as session:
        return session.run([ids])[:, -1:]


def in_sessions(make: Make) -> str:
    """A second prompt that begins as the first."""
    plain, model = make("base"), make("paged-prefix")
    rng = np.random.default_rng(2)
    first = rng.integers(3, model.facts.vocab_size, 40).tolist()
    second = [*first, *rng.integers(3, model.facts.vocab_size, 9).tolist()]
    with model.session() as session:
        session.prompt([first])
    with model.session() as session:
        right = near(session.prompt([second]), again(plain, second))
        return told(right, int(session.stats["reused"]), len(first))


def on_the_server(make: Make) -> str:
    """A second turn behind the first and its answer."""
    plain, model = make("base"), make("paged-prefix")
    rng = np.random.default_rng(3)
    text, right = rng.integers(3, model.facts.vocab_size, 40).tolist(), True
    with Engine(model) as engine:
        for _ in range(2):
            ticket = engine.submit(Request(np.array(text), params()))
            answer = [event.token for event in ticket]
            right &= answer == tokens(plain, [text], {})[0]
            known = len(text)
            text += [*answer, *rng.integers(3, model.facts.vocab_size, 9).tolist()]
        return told(right, int(engine.stats["reused_tokens_total"]), known - NEW - 9)


def told(right: bool, reused: int, whole: int) -> str:
    return (
        "wrong"
        if not right
        else "right"
        if reused > whole - BLOCK
        else f"reuses {reused} of {whole}"
    )


def saved(make: Make) -> str:
    """A file, from which a session goes on, back to an earlier token too."""
    model = make("base")
    ids = prompts(model)[0]
    with tempfile.TemporaryDirectory() as folder:
        with model.session() as session:
            session.prompt([ids])
            session.save(f"{folder}/one.session")
        with model.open_session(f"{folder}/one.session") as session:
            right = near(session.run([[7]]), again(model, [*ids, 7]))
            session.rewind(len(ids) - 5)
            right &= near(session.run([[9]]), again(model, [*ids[:-5], 9]))
    return "right" if right else "wrong"


def edited(make: Make) -> str:
    """Tokens in the middle become others."""
    model = make("base")
    ids = prompts(model)[0]
    with model.session() as session:
        session.prompt([ids])
        found = session.edit(10, 14, [5, 6])
        return "right" if near(found, again(model, [*ids[:10], 5, 6, *ids[14:]])) else "wrong"


def drafted(recipe: Any) -> Callable[[Make], str]:
    """Tokens of drafts, of two rows, greedy and seeded; whether any drafted token stood."""

    def way(make: Make) -> str:
        plain, model = make("base"), make(recipe)
        for one in filter(None, (model, model.draft_model)):
            one._costs = Costs((1, 32), (1.0, 1.0))
        for asked in ({}, SAMPLED):
            with patch.object(Guard, "limit", PropertyMock(return_value=5)):
                out = model.generate(prompts(model), sampling_params=params(**asked))
            if out.tokens != tokens(plain, prompts(plain), asked):
                return "wrong"
            if not asked and not out.stats["speculation"]["drafted"]:
                return "drafts nothing"
        return "right"

    return way


def searched(make: Make) -> str:
    """Beams: rows that part, change places and go back have the logits of recomputing; and a search runs."""
    model = make("beam-patience")
    ids = prompts(model)[0]
    with model.session() as session:
        session.prompt([ids])
        session.select([0, 0, 0])
        session.run([[5], [6], [7]])
        session.select([2, 0, 0])
        session.run([[8], [9], [10]])
        session.rewind([len(ids) + 2, len(ids) + 1, len(ids) + 2])
        found = session.run([[11], [12], [13]])
    texts = [[7, 8, 11], [5, 12], [5, 10, 13]]
    right = all(near(a[None], again(model, ids + b)) for a, b in zip(found, texts, strict=True))
    return "right" if right and len(tokens(model, [ids], {})[0]) == NEW else "wrong"


WAYS: dict[str, Callable[[Make], str]] = {
    "prefix in sessions": in_sessions,
    "turns on the server": on_the_server,
    "saved session": saved,
    "edit": edited,
    "prompt lookup": drafted("prompt-lookup"),
    "draft model": drafted("draft-model"),
    "beams": searched,
}


def maker(model_type: str, target: str, folder: str) -> Make:
    """make(recipe) -> the build of a type, each once. It drafts for itself, but for noise on its weights."""
    module, made = small_model(model_type), dict[str, Model]()

    def draft() -> str:
        import torch

        path, rng = Path(folder) / "draft", torch.Generator().manual_seed(1)
        if not path.exists():
            other = small_model(model_type)
            with torch.no_grad():
                for weight in other.parameters():
                    weight += 0.1 * weight.std() * torch.randn(weight.shape, generator=rng)
            accel.optimize(other, "base", out=path, **SIZES).close()
        return str(path)

    def make(recipe: str) -> Model:
        if recipe not in made:
            if recipe == "draft-model":
                named: Any = {
                    "draft": {"use": "model", "path": draft()},
                    "verify": {"use": "sample-match"},
                }
            else:
                named = recipe
            made[recipe] = accel.optimize(module, named, target=target, **SIZES)
        return made[recipe]

    return make


def outcome(way: Callable[[Make], str], make: Make) -> str:
    try:
        return way(make)
    except AccelError as error:
        return "refused: " + " ".join(str(error).split())[:110]
    except Exception as error:
        return f"crashed: {type(error).__name__}: {error}"[:110]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("types", nargs="*", help="model types; by default those without a result")
    parser.add_argument("--target", default="onnx")
    parser.add_argument("--write", action="store_true", help=f"write {TABLE.relative_to(ROOT)}")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    rows = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    version = importlib.metadata.version("transformers")
    for name in args.types or [name for name in types() if name not in rows]:
        with tempfile.TemporaryDirectory() as folder:
            make = maker(name, args.target, folder)
            rows[name] = [outcome(way, make) for way in WAYS.values()] + [version]
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(json.dumps(rows, indent=1), encoding="utf-8")
        print(f"| {name} | {' | '.join(rows[name])} |", flush=True)
    if args.write:
        TABLE.write_text(page(rows), encoding="utf-8")
    return int(any(cell.startswith(("wrong", "crashed")) for row in rows.values() for cell in row))


def page(rows: Mapping[str, list[str]]) -> str:
    """docs/figures/details/hybrids.md."""
    lines = [
        "# Hybrids: what goes back, and what is shared",
        "",
        "Every causal type of transformers whose layers carry recurrent state, small and of random weights, in each "
        "way that needs state to go back or to be shared. Right: the logits of recomputing to 1e-3 of the largest, or "
        "the tokens of plain decoding, greedy and seeded, of two rows of other lengths. Made by "
        "`python tools/matrix/hybrids.py --write`; the last column is transformers' version. How it works: "
        "[recurrent state](../../internals/recurrent.md).",
        "",
        f"| type | {' | '.join(WAYS)} | with |",
        f"|---|{'---|' * len(WAYS)}---|",
        *(f"| {name} | {' | '.join(rows[name])} |" for name in sorted(rows)),
    ]
    if left := [name for name in types() if name not in rows]:
        lines += ["", f"Without a result: {', '.join(left)}."]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
