"""accel: a variant is recipes joined by `+`; `float32` is the recipe `base`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

PACKAGES = ("accel", "onnxruntime")
INSTALL = "accel-compile"
VARIANTS = ()


def file_name(variant: str, context: int, batch: int) -> str:
    return f"{variant}-{context}x{batch}"


def sources() -> list[Path]:
    from importlib.util import find_spec

    parts = ("ir", "passes", "lowering", "runtime", "recipes")
    specs = [find_spec(f"accel.{part}") for part in parts]
    return [
        Path(s.submodule_search_locations[0]) for s in specs if s and s.submodule_search_locations
    ]


def prepare(checkpoint: Path, out: Path, variant: str, context: int, batch: int) -> None:
    import subprocess
    import sys

    names = ["base"] if variant == "float32" else variant.split("+")
    command = [sys.executable, "-m", "accel.cli", "build", str(checkpoint), "--out", str(out)]
    command += [word for name in names for word in ("--recipe", name)]
    command += ["--max-context", str(context), "--max-batch", str(batch)]
    if code := subprocess.run(command).returncode:
        sys.exit(code)  # it has said what is wrong


class Session:
    def __init__(self, model: Any, batch: int):
        self.session = model.session(batch)
        self.length = 0
        self.first: Any = None

    def run(self, tokens: Any) -> Any:
        return self.session.run(tokens, last_only=True)[:, -1].argmax(-1)[:, None]

    def prefill(self, prompts: list[list[int]]) -> list[int]:
        import numpy as np

        self.session.rewind(0)
        self.first = self.run(np.array(prompts))
        self.length = len(prompts[0])
        return self.first[:, 0].tolist()

    def decode(self, new: int) -> list[float]:
        self.session.rewind(self.length)
        tokens, seconds = self.first, []
        for _ in range(new):
            start = time.perf_counter()
            tokens = self.run(tokens)
            seconds.append(time.perf_counter() - start)
        return seconds

    def close(self) -> None:
        self.session.close()


class Model:
    def __init__(self, path: Path, threads: int):
        import accel

        self.model = accel.load(path, threads=threads)
        self.vocabulary = self.model.facts.vocab_size

    def session(self, batch: int, room: int) -> Session:
        return Session(self.model, batch)


def load(path: Path, variant: str, threads: int) -> Model:
    return Model(path, threads)
