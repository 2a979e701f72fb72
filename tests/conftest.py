"""Fixtures of all tests. One compute thread: the models are tiny, and idle threads would spin."""

import copy
import os
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import models
import pytest
import torch

import accel
from accel.ir.capture import capture
from accel.ir.program import Entry, Program
from accel.runtime.small import small_model

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


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory):
    """What is measured here is not kept in the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


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


def clone(program: Program) -> Program:
    """A copy whose graphs and facts are its own; parameters are shared."""
    return Program(
        program.params.copy(),
        {n: Entry(copy.deepcopy(e.graph), list(e.outputs)) for n, e in program.entries.items()},
        copy.deepcopy(program.facts),
        list(program.state),
        dict(program.dims),
    )


@pytest.fixture(scope="session")
def captured():
    """captured(name) -> a fresh copy of its captured program, of two layers.

    The name is of tools/models.py, "tiny", or any model type of transformers.
    """
    made = {}

    def get(name: str) -> Program:
        if name not in made:
            known = {**models.ARCHITECTURES, "tiny": models.tiny}
            make = known.get(name, partial(small_model, name))
            layers, models.LAYERS = models.LAYERS, 2
            try:
                made[name] = capture(make(), max_context=128)
            finally:
                models.LAYERS = layers
        return clone(made[name])

    return get
