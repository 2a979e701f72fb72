"""Fixtures of all tests. One compute thread: the models are tiny, and idle threads would spin."""

import os
from pathlib import Path
from types import SimpleNamespace

import models
import pytest
import torch

import accel

torch.set_num_threads(1)


class Golden:
    """Text that is kept beside the tests; `GOLDEN=write pytest` writes it anew."""

    folder = Path(__file__).parent / "golden"

    def check(self, name: str, text: str) -> None:
        path = self.folder / f"{name}.txt"
        if os.environ.get("GOLDEN") == "write":
            path.write_text(text, encoding="utf-8")
        if not path.exists():
            pytest.fail(f"no {path.name}; write it with GOLDEN=write pytest, then read it")
        want = path.read_text(encoding="utf-8").splitlines()
        # lists of lines: pytest shows which ones differ
        assert text.splitlines() == want, f"{path.name} differs; if it should: GOLDEN=write pytest"


@pytest.fixture
def golden() -> Golden:
    return Golden()


@pytest.fixture(scope="session")
def build():
    """build(architecture) -> its module and the ONNX build of it, made once for all tests."""
    made = {}

    def get(name: str) -> SimpleNamespace:
        if name not in made:
            model = models.ARCHITECTURES[name]()
            compiled = accel.optimize(model, "base", max_context=256, max_batch=4)
            made[name] = SimpleNamespace(name=name, model=model, compiled=compiled)
        return made[name]

    yield get
    for each in made.values():
        each.compiled.close()
