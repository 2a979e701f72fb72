"""Fixtures of all tests. One compute thread: the models are tiny, idle threads would spin, and the
other cores have tests of their own.
"""

import gc
import os
import shutil
import tempfile
from contextlib import ExitStack
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import models
import pytest
import real
import torch

import accel
from accel.compiler import report
from accel.compiler.over_state import over_state
from accel.compiler.pipeline import pipeline
from accel.ir.capture.capture import capture
from accel.ir.errors import InputError
from accel.ir.program import Program
from accel.ir.user_cache import cache_folder, private_folder
from accel.lowering.onnx import native
from accel.lowering.onnx.variants import NATIVE
from accel.lowering.triton.writer import tuned
from accel.passes import run
from accel.runtime.backends import clock
from accel.runtime.backends.onnx import tune
from accel.runtime.decode import costs

from . import captures, interpreted, sampled, traces
from .once import made_once
from .select_case import Selecting, built

os.environ["OMP_NUM_THREADS"] = "1"  # of models too, and of processes that tests start
torch.set_num_threads(1)
gc.set_threshold(100_000, 20, 20)  # graphs are many small objects that live on: a tenth of a build
captures.share()
traces.watch()
if os.environ.get("TRITON_INTERPRET"):
    interpreted.once()
DRAWN = report._bars, report._errors
report._bars = report._errors = lambda *_: ""  # a tenth of a build, where no test looks at them


@pytest.fixture
def figures(monkeypatch):
    """Reports have theirs."""
    for name, drawn in zip(("_bars", "_errors"), DRAWN, strict=True):
        monkeypatch.setattr(report, name, drawn)


class Ticks:
    """A clock that moves by the same at each look, whatever else the machine does."""

    def __init__(self):
        self.seconds = 0.0

    def __call__(self):
        self.seconds += 1e-3
        return self.seconds


def no_time():
    """What the host does beside calls takes none."""
    return 0.0


def native_first(sessions, runs, limit):
    """Seconds of each variant: accel's own operators run where there are any."""
    return {name: 0.5 if name == NATIVE else 1.0 for name in runs}


# A busy machine must decide nothing: how wide calls are moves the last digits of logits.
REAL = clock.now, clock.host_now, tune._turns, costs.ROUNDS


@pytest.fixture
def real_time(monkeypatch):
    """Clocks as users have them."""
    monkeypatch.setattr(clock, "now", REAL[0])
    monkeypatch.setattr(clock, "host_now", REAL[1])
    monkeypatch.setattr(tune, "_turns", REAL[2])
    monkeypatch.setattr(costs, "ROUNDS", REAL[3])


def pytest_configure(config):
    """What is measured here is not kept in the user's cache, but in one of this run, which all
    workers inherit. Only the compiled operators outlive it: their name says what they are of. Real
    models are the user's.
    """
    clock.now, clock.host_now, tune._turns = Ticks(), no_time, native_first
    costs.ROUNDS = 1  # of calls that all take as long by that clock
    tuned.LIMIT = 0.0
    if hasattr(config, "workerinput"):
        return
    run, patch = Path(tempfile.mkdtemp(prefix="accel-tests-")), pytest.MonkeyPatch()
    config.add_cleanup(lambda: shutil.rmtree(run, ignore_errors=True))
    config.add_cleanup(patch.undo)
    fetched = cache_folder() / "models"
    patch.setenv("XDG_CACHE_HOME", str(Path(__file__).parents[1] / "build" / "tests"))
    library, _ = native.library()
    patch.setenv("XDG_CACHE_HOME", str(run))
    native.forget()
    if library:
        for file in library.parent.glob(f"{library.stem}.*"):
            shutil.copy(file, private_folder())
    (private_folder() / "models").symlink_to(fetched)


@pytest.hookimpl(tryfirst=True)  # before what is long is left out
def pytest_collection_modifyitems(items):
    sampled.mark(items)


@pytest.fixture(autouse=True, scope="module")
def settled():
    """A build collects garbage, and would look at all that the tests before it keep."""
    gc.collect()
    gc.freeze()


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
def real_model():
    """real_model(name) -> where a model of tools/models/real.py lies; the test is left out where it
    was not fetched.
    """

    def get(name: str, lacking=pytest.skip) -> Path:
        try:
            return real.path(name)
        except InputError as error:
            lacking(str(error))

    return get


@pytest.fixture(scope="session")
def smollm2(real_model) -> Path:
    """The GGUF file of SmolLM2-135M-Instruct. CI has it: there, a test that needs it fails without."""
    ci = os.environ.get("CI") == "true"
    return real_model("smollm2-135m", partial(pytest.fail, pytrace=False) if ci else pytest.skip)


@pytest.fixture(scope="session")
def build():
    """build(architecture) -> its module and the ONNX build of it, made once for all tests."""
    with ExitStack() as stack:

        @cache
        def get(name: str) -> SimpleNamespace:
            model = models.ARCHITECTURES[name]()
            made = accel.optimize(model, "base", max_context=256, max_batch=4)
            return SimpleNamespace(name=name, model=model, compiled=stack.enter_context(made))

        yield get


def own(program: Program) -> Program:
    """A copy that shares no traces of a test that replaces something: see `traces`."""
    return traces.shared(program.copy())


@pytest.fixture(scope="session")
def captured():
    """captured(name) -> a fresh copy of its captured program, of two layers.

    The name is of tools/models/models.py, "tiny", or any model type of transformers.
    """
    made = cache(lambda name: capture(models.make(name, 2), max_context=128))
    return lambda name: own(made(name))


@pytest.fixture(scope="session")
def deep():
    """deep(architecture, target, **options of a method) -> (module of four layers, its build)."""
    module = cache(lambda name: models.make(name, 4))

    def make(name, target="onnx", **options):
        recipe, verify = (
            {"depth": options} if options else "base",
            (target, name) == ("onnx", "llama"),
        )
        return accel.optimize(
            module(name), recipe, target=target, max_context=64, max_batch=2, verify=verify
        )

    with made_once(make) as made:
        yield lambda name, *target, **options: (module(name), made(name, *target, **options))


@pytest.fixture(scope="session")
def stateful(captured):
    """stateful(name) -> a fresh copy of its captured program, as the recipe's passes over the state
    find it.
    """
    made = cache(lambda name: over_state(captured(name)))
    return lambda name: own(made(name))


@pytest.fixture
def passed(captured):
    """passed(name) -> its program over explicit state, in layers."""

    def get(name: str) -> Program:
        program = captured(name)
        run(program, pipeline(program.facts.encoder is not None))
        return program

    return get


@pytest.fixture(scope="module")
def selecting(stateful):
    """selecting(name, **options) -> a small Llama of two layers with a method of kv.select; none: without."""

    @cache
    def get(name: str | None = None, **options: Any) -> Selecting:
        return Selecting(stateful("llama"), built(name, **options) if name else None)

    return get
