"""Make the part of a method for the bundled model, on what that was trained on.

    python tools/train/part.py trim-kv --out trim-kv.safetensors --minutes 25 --length 256
    python tools/train/part.py distillspec --model SMALL --target api/reference --out TUNED   # another folder's

The options are those of `accel-compile train`, which makes parts for other models. A tuning of a draft
model (`distillspec`) is of the bundled one.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
from reference_data import REFERENCE, encode, sources, tasks
from rows import Rows, Stage
from tokenizers import Tokenizer
from torch import Tensor

from accel.compiler.train.host import HostKind
from accel.compiler.train.kind import kind_of, trained_methods, tunings
from accel.compiler.train.options import TrainOptions
from accel.compiler.train.train import train
from accel.ir.errors import AccelError

ANSWERED = ("rest", "key_value", "rest", "copy")  # tasks, in turn
MIX = {"library": 4.0, "pass_key": 1.0, "key_value": 2.0, "copy": 1.0, "repeat": 1.0}


def bundled_rows(length: int, rows: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """What the bundled model was trained on, for ever."""
    tokenizer = Tokenizer.from_file(str(REFERENCE / "tokenizer.json"))
    texts = sources()[0]
    np.random.default_rng(seed).shuffle(texts)  # type: ignore[arg-type]
    drawn = Rows(tokenizer, {"library": encode(tokenizer, texts[: len(texts) // 3])}, seed, mix=MIX)
    for step in itertools.count():
        batch = drawn.draw(Stage(rows * length, {length: 1.0}), step)
        yield batch.ids, batch.weights


def bundled_tasks(file: Path, count: int, longest: int, seed: int) -> Path:
    """Tasks of 60 to `longest` tokens that the bundled models were trained on the like of, as JSON lines."""
    rng, lines = random.Random(f"parts {seed}"), []
    for number in range(count):
        task, size = ANSWERED[number % len(ANSWERED)], rng.randrange(60, longest)
        if task == "rest":
            pieces = tasks.rest(rng, tasks.lines_for("copy", size), rng.randrange(1, 4))
            prompt, answer = "".join(text for text, _ in pieces[:-2]), pieces[-2][0]
        else:
            prompt, answer = tasks.make(task, rng, size)
        lines.append(json.dumps({"prompt": prompt, "answer": answer}))
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return file


def model_of(method: str) -> Path:
    """The bundled model that a method or a tuning is for."""
    if method in tunings():
        return REFERENCE / "draft" if tunings()[method].drafts else REFERENCE
    known = trained_methods()
    fills = method in known and getattr(known[method][1], "masked_diffusion", False)
    return REFERENCE / "diffusion" if fills else REFERENCE


def arguments(words: list[str]) -> tuple[str, dict[str, Any]]:
    """The method, and the options that are given."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("method")
    parser.add_argument("--model", type=Path, help="another folder than the bundled model's")
    for one in fields(TrainOptions):
        if isinstance(one.default, bool):
            parser.add_argument(f"--{one.name}", action="store_true")
        else:
            kind = Path if one.default is None else type(one.default)
            parser.add_argument(f"--{one.name}", type=kind)
    for name, default in {f.name: f.default for t in tunings().values() for f in fields(t)}.items():
        parser.add_argument(f"--{name}", type=type(default))
    found = vars(parser.parse_args(words))
    return found.pop("method"), {n: v for n, v in found.items() if v is not None and v is not False}


def main(words: list[str]) -> None:
    method, given = arguments(words)
    one = trained_methods().get(method, ("", object))[1]
    if "draft" in getattr(one, "models", ()):
        given.setdefault("draft", REFERENCE / "draft")
    if method in tunings() and tunings()[method].drafts:
        given.setdefault("target", REFERENCE)
    with tempfile.TemporaryDirectory() as folder:
        kind = kind_of(one)
        if kind is not None and issubclass(kind, HostKind) and kind.asks:
            options = TrainOptions.of(method, {n: v for n, v in given.items() if n != "model"})
            count = options.samples * options.rows
            file, longest = Path(folder) / "tasks", max(100, options.length)
            given.setdefault("tasks", bundled_tasks(file, count, longest, options.seed))
        run(method, given)


def run(method: str, given: dict[str, Any]) -> None:
    model = given.pop("model", None) or model_of(method)
    try:
        made = train(method, model, given, rows=bundled_rows, say=print)
    except (AccelError, OSError) as error:
        raise SystemExit(f"part: {error}") from None
    if made.file is None:
        raise SystemExit(f"part: {made.message}")
    print(f"{made.file}: {made.message}")


if __name__ == "__main__":
    main(sys.argv[1:])
