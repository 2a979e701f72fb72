"""The bundled model's folder, tokens and tasks, the standard library's sources, and which of them are held out."""

from __future__ import annotations

import importlib.util
import sysconfig
from pathlib import Path
from types import ModuleType

import numpy as np
from tokenizers import Tokenizer

REFERENCE = Path(__file__).resolve().parents[2] / "api" / "reference"
BOS, EOS, PAD = 0, 1, 2
SPECIAL = ["<|bos|>", "<|eos|>", "<|pad|>"]
HELD_OUT = (
    "bisect.py",
    "calendar.py",
    "csv.py",
    "fractions.py",
    "heapq.py",
    "json/encoder.py",
    "queue.py",
    "sched.py",
    "shlex.py",
    "textwrap.py",
    "wsgiref/handlers.py",
    "xml/dom/pulldom.py",
)
SKIPPED = {"test", "tests", "idle_test", "site-packages", "encodings", "pydoc_data"}


def _beside(name: str) -> ModuleType:
    """A module of the bundled model's folder, by path: training runs from a checkout which is not installed."""
    spec = importlib.util.spec_from_file_location(f"reference_{name}", REFERENCE / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


tasks, functions = _beside("tasks"), _beside("functions")


def sources() -> tuple[list[str], list[str]]:
    """The texts of the standard library to train on, and of `HELD_OUT`."""
    root = Path(sysconfig.get_path("stdlib"))
    train = []
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if SKIPPED.isdisjoint(name.parts) and name.as_posix() not in HELD_OUT:
            train.append(path.read_text(encoding="utf-8", errors="ignore"))
    return train, [(root / name).read_text(encoding="utf-8") for name in HELD_OUT]


def encode(tokenizer: Tokenizer, texts: list[str]) -> np.ndarray:
    """All texts in one row of ids, each between <|bos|> and <|eos|>."""
    rows = [[*row.ids, EOS] for row in tokenizer.encode_batch(texts)]
    return np.array([token for row in rows for token in row], dtype=np.int32)
