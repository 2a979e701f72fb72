"""Which candidate of a launch is taken, and when it is measured."""

from types import SimpleNamespace

import pytest
import torch

from accel.lowering.triton.writer import tuned
from accel.lowering.triton.writer.tuned import Choice, Tuned

FIRST, SECOND = Choice({"BLOCK": 16}, 4), Choice({"BLOCK": 32}, 8, 3)


class Kernel:
    """Notes launches."""

    arg_names = ("x", "N", "BLOCK")

    def __init__(self):
        self.launches = []

    def __getitem__(self, grid):
        return lambda *args, **options: self.launches.append((grid, options))


class Tuner:
    """Takes ten seconds, and the last candidate."""

    def __init__(self, owner, clock):
        self.owner, self.clock, self.measured = owner, clock, 0

    def __getitem__(self, grid):
        return self._run

    def _run(self, *args, **constants):
        self.clock.now += 10
        self.measured += 1
        last = self.owner._candidates[-1]
        self.best_config = SimpleNamespace(
            kwargs=dict(last.constants), num_warps=last.num_warps, num_stages=last.num_stages
        )


@pytest.fixture
def made(monkeypatch):
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(tuned.time, "monotonic", lambda: clock.now)
    monkeypatch.setattr(tuned, "_spent", 0.0)
    monkeypatch.setattr(tuned, "LIMIT", 60.0)
    kernel = Tuned(Kernel(), ["N"])
    kernel._tuner = Tuner(kernel, clock)
    return kernel


def launch(kernel, n, dtype=torch.float32):
    return kernel(lambda x: (x["BLOCK"],), [FIRST, SECOND], torch.zeros(1, dtype=dtype), n)


def test_nothing_is_measured_in_the_interpreter(made):
    if torch.cuda.is_available():
        pytest.skip("kernels are not interpreted here")
    assert launch(made, 5) is FIRST and not made._tuner.measured
    assert made._kernel.launches == [((16,), {"BLOCK": 16, "num_warps": 4, "num_stages": 2})]


def test_each_shape_and_dtype_is_measured_once(made, monkeypatch):
    monkeypatch.setattr(tuned, "_may_measure", lambda: True)
    for n, dtype, measured in (
        (5, torch.float32, 1),
        (5, torch.float32, 1),
        (6, torch.float32, 2),
        (5, torch.half, 3),
    ):
        assert launch(made, n, dtype) == SECOND
        assert made._tuner.measured == measured
    assert made._kernel.launches[-1] == ((32,), {"BLOCK": 32, "num_warps": 8, "num_stages": 3})


def test_a_model_has_a_limit_of_its_own(made, monkeypatch):
    monkeypatch.setattr(tuned, "_may_measure", lambda: tuned._spent < tuned.LIMIT)
    found = [launch(made, n) for n in range(8)]
    assert found == [SECOND] * 6 + [FIRST] * 2, "60 seconds are six measurements"
    assert launch(made, 0) == SECOND, "what was measured is known"
    tuned.begin()
    assert launch(made, 7) == SECOND


def test_what_is_known_is_a_place_among_the_candidates(made, monkeypatch):
    """A launch of the same key with other sizes has room for its own candidates alone."""
    monkeypatch.setattr(tuned, "_may_measure", lambda: True)
    assert launch(made, 5) == SECOND
    smaller = [Choice({"BLOCK": 4}, 4), Choice({"BLOCK": 8}, 8, 3)]
    x = torch.zeros(1)
    assert made(lambda x: (x["BLOCK"],), smaller, x, 5) is smaller[1]
    assert made(lambda x: (x["BLOCK"],), smaller[:1], x, 5) is smaller[0]
    assert made._tuner.measured == 1 and made._kernel.launches[-1][0] == (4,)


def test_of_some_operands_the_next_power_of_two_counts(made, monkeypatch):
    monkeypatch.setattr(tuned, "_may_measure", lambda: True)
    near = Tuned(made._kernel, [], near=["N"])
    near._tuner = made._tuner
    near._tuner.owner = near
    for n, measured in ((5, 1), (8, 1), (9, 2), (16, 2), (4, 3)):
        assert launch(near, n) == SECOND and near._tuner.measured == measured


def test_equal_candidates_are_measured_once(made, monkeypatch):
    monkeypatch.setattr(tuned, "_may_measure", lambda: True)
    assert made(lambda x: (1,), [FIRST, FIRST, SECOND, SECOND], torch.zeros(1), 5) == SECOND
    assert made._candidates == [FIRST, SECOND]
