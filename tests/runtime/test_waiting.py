"""Threads of a call spin only where the cores are free, and torch's rest while they wait."""

import hashlib
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from accel.ir import openmp
from accel.ir.errors import InputError
from accel.runtime.backends.onnx import waiting as module
from accel.runtime.backends.onnx.backend import OrtBackend
from accel.runtime.backends.onnx.waiting import FREE, share, waiting

SPINS = "session.intra_op.allow_spinning"


@pytest.fixture(autouse=True)
def unset(monkeypatch):
    monkeypatch.delenv(module.CHOICE, raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    module._free.cache_clear()
    yield
    module._free.cache_clear()


def test_threads_beside_busy_ones_do_not_get_the_cores():
    over = threading.Event()
    busy = [
        threading.Thread(target=lambda: [hashlib.sha256(bytes(1 << 20)) for _ in iter(over.is_set, True)])
        for _ in range(3 * len(os.sched_getaffinity(0)))
    ]  # fmt: skip
    for thread in busy:
        thread.start()
    try:
        assert share(2) < FREE
    finally:
        over.set()
        for thread in busy:
            thread.join()


@pytest.mark.parametrize(("free", "spins"), [(0.98, True), (0.5, False)])
def test_threads_spin_where_the_cores_are_free(build, monkeypatch, free, spins):
    monkeypatch.setattr(module, "share", lambda threads: free)
    engine = OrtBackend(build("llama").compiled.artifact, threads=2)
    assert engine.waiting.spinning == spins and engine.waiting.free == free
    told = engine.session.get_session_options().get_session_config_entry(SPINS)
    assert told == str(int(spins))


def test_models_of_a_process_wait_alike(monkeypatch):
    """The second is opened while threads of the first spin."""
    shares = iter((0.98, 0.5))
    monkeypatch.setattr(module, "share", lambda threads: next(shares))
    assert [waiting(2).spinning, waiting(2).spinning] == [True, True]


@pytest.mark.parametrize("asked", ["0", "1"])
def test_a_user_chooses(monkeypatch, asked):
    monkeypatch.setenv(module.CHOICE, asked)
    monkeypatch.setattr(module, "share", lambda threads: pytest.fail("measured"))
    assert waiting(2).spinning == (asked == "1") and module.CHOICE in waiting(2).why


def test_another_choice_is_refused(monkeypatch):
    monkeypatch.setenv(module.CHOICE, "yes")
    with pytest.raises(InputError, match="ACCEL_SPINNING=yes: give 1"):
        waiting(2)


@pytest.mark.parametrize("threads", [1, 3])
def test_nothing_is_measured_where_nothing_can_be_won(monkeypatch, threads):
    monkeypatch.setattr(module, "share", lambda threads: pytest.fail("measured"))
    assert not waiting(threads).spinning


@pytest.mark.parametrize("given", [None, "ACTIVE"])
def test_importing_accel_sets_the_policy_unless_the_user_did(given):
    env = {k: v for k, v in os.environ.items() if k != openmp.POLICY} | (
        {} if given is None else {openmp.POLICY: given}
    )
    code = f"import accel, os; print(os.environ[{openmp.POLICY!r}])"
    folder = Path(__file__).parents[2] / "build" / "links"
    env["PYTHONPATH"] = os.pathsep.join([str(folder), env.get("PYTHONPATH", "")])
    out = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
    )
    assert out.stdout.strip() == (given or "PASSIVE")


@pytest.mark.parametrize("late", [True, False])
def test_where_torch_came_first_a_team_of_threads_waits(monkeypatch, late):
    tasks = Path("/proc/self/task")
    if not tasks.exists():
        pytest.skip("threads are counted in /proc")
    monkeypatch.setattr(openmp, "_late", late)
    openmp.rest_late.cache_clear()
    torch.set_num_threads(2)
    try:
        before = len(list(tasks.iterdir()))
        openmp.rest_late()
        more = len(list(tasks.iterdir())) - before
    finally:
        torch.set_num_threads(1)
        openmp.rest_late.cache_clear()
    assert more >= 2 if late else not more  # one of Python, and one of OpenMP
