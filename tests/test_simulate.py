"""tools/bench/simulate.py: no request, token or block is lost, and times are those of the calls."""

from dataclasses import replace

import numpy as np
import pytest
import simulation
from simulate import schedule_of
from simulation import Asked, Costs, Lost, poisson
from simulation_costs import fitted

from accel.ir.axis import find_axes
from accel.ir.errors import AccelError
from accel.runtime.schedule import Limits, Route
from accel.runtime.schedule.continuous_batching import ContinuousBatching
from accel.runtime.schedule.nexus import Nexus
from accel.runtime.schedule.sarathi import Sarathi
from accel.runtime.schedule.splitwise import Splitwise

AXIS = find_axes()["schedule"]
COSTS = Costs(
    *(0.001, 0.0002, 1e-7, 0.002, 0.0002, 1e-7, 0.001, 1e-6), bandwidth=0.5, iteration=1e-4
)
FEW = Limits(rows=8, blocks=24, block=8)  # requests run again


def of(schedule, asked, limits=FEW):
    return simulation.simulate(schedule, asked, limits, COSTS)


SMALL = {"nexus": {"tokens": 20}, "sarathi": {"tokens": 24}}


@pytest.mark.parametrize("name", AXIS.names())
def test_all_is_served_once_and_whole(name):
    schedule = AXIS.build(name, **SMALL.get(name, {}))
    preempted = 0
    for seed in range(2):
        asked = poisson(40, 60.0, prompt=40, output=12, seed=seed)
        found = of(schedule, asked)
        preempted += found.preemptions
        assert len(found.refused) < 5
        ample = of(schedule, asked, Limits(rows=8, blocks=4000))
        assert not ample.refused and not ample.preemptions
    assert preempted


class Forgets(Splitwise):
    """A third of the requests go nowhere."""

    def route(self, places, prompt, most):
        return None if prompt % 3 == 0 else super().route(places, prompt, most)


class Elsewhere(Splitwise):
    """The state goes to the process that ran the prompt, which has let go of it."""

    def route(self, places, prompt, most):
        route = super().route(places, prompt, most)
        return Route(route.prompt, 7)


def test_what_loses_a_request_is_caught(monkeypatch):
    asked = poisson(12, 60.0, seed=3)
    with pytest.raises(Lost, match="got 0 tokens"):
        of(Forgets(), asked)
    with pytest.raises(IndexError):
        of(Elsewhere(), asked)
    monkeypatch.setattr(simulation.World, "move", lambda self, i, to, now: None)
    with pytest.raises(Lost, match="ends with work"):
        of(Splitwise(), asked)


def test_a_token_that_is_lost_or_early_is_caught(monkeypatch):
    asked = [Asked(1.0, 9, 4)]
    with pytest.raises(Lost, match="3 tokens of 4"):
        simulation.Result(asked, [[2.0, 3.0, 4.0]]).check()
    with pytest.raises(Lost, match="before its time"):
        simulation.Result(asked, [[0.5, 3.0, 4.0, 5.0]]).check()


def test_times_of_one_request():
    """The sum of its calls."""
    one, limits = [Asked(2.0, 50, 3)], Limits(rows=8, blocks=400)
    plain = [2.0 + 1e-4 + COSTS.prompt(50, 0)]
    for made in (0, 1):
        plain.append(plain[-1] + 1e-4 + COSTS.decode([50 + made]))
    assert np.allclose(of(ContinuousBatching(), one, limits).tokens[0], plain)
    split = of(Splitwise(), one, limits)
    late = 2 * COSTS.moved(50) + 1e-4  # it is sent, and taken over in an iteration
    assert np.allclose(split.tokens[0], [plain[0], *(t + late for t in plain[1:])])
    assert split.moved == 50
    halves = simulation.simulate(Splitwise(), one, limits, COSTS, apart=False).tokens[0]
    assert np.allclose(halves[0], 2.0 + 1e-4 + COSTS.prompt(50, 0, 0.5))
    chunks = 2 * 1e-4 + COSTS.prompt(32, 0) + COSTS.prompt(18, 32)
    assert np.allclose(of(Nexus(tokens=32), one, limits).tokens[0][0], 2.0 + chunks)


def test_what_schedules_are_for():
    """In simulation: a long prompt beside those that decode."""
    asked = [Asked(0.0, 8, 200), Asked(0.1, 3000, 4), Asked(0.12, 8, 4)]
    limits = Limits(rows=4, blocks=400)
    whole = of(ContinuousBatching(), asked, limits)
    gaps = {}
    for schedule in (ContinuousBatching(), Sarathi(tokens=64), Splitwise(), Nexus(tokens=64)):
        found = of(schedule, asked, limits)
        gaps[type(schedule)] = max(np.diff(found.tokens[0]))
        if isinstance(schedule, Nexus):
            assert found.tokens[2][0] < whole.tokens[2][0] / 5, (
                "a short prompt waits for a long one"
            )
    assert gaps[ContinuousBatching] > 0.6
    assert all(gap < 0.05 for kind, gap in gaps.items() if kind is not ContinuousBatching)


def test_one_process_is_continuous_batching():
    asked = poisson(40, 60.0, prompt=40, output=12)
    one = of(Splitwise(prompt=0, token=0, mixed=1), asked)
    assert one == of(ContinuousBatching(), asked) and not one.moved
    assert one != of(Splitwise(), asked)


def test_traces_and_costs(tmp_path):
    (tmp_path / "a.csv").write_text("arrival,prompt,output\n2,5,6\n0.5,3,4\n")
    (tmp_path / "a.jsonl").write_text('{"arrival": 0.5, "prompt": 3, "output": 4}\n')
    assert simulation.trace(tmp_path / "a.csv") == [Asked(0.5, 3, 4), Asked(2.0, 5, 6)]
    assert simulation.trace(tmp_path / "a.jsonl") == [Asked(0.5, 3, 4)]
    for text in ("arrival,prompt\n1,2\n", "arrival,prompt,output\n1,0,2\n", ""):
        (tmp_path / "b.csv").write_text(text)
        with pytest.raises(AccelError, match="b.csv"):
            simulation.trace(tmp_path / "b.csv")
    features = [(1, n, n * n) for n in (1, 5, 20, 90)]
    seconds = [3 + 2 * n for n in (1, 5, 20, 90)]
    assert np.allclose(fitted(features, seconds), [3, 2, 0], atol=1e-6)
    less = fitted(features, [9 - 0.01 * n for n in (1, 5, 20, 90)])
    assert less.min() >= 0
    assert schedule_of("sarathi:tokens=9") == Sarathi(tokens=9)
    with pytest.raises(AccelError, match="no number"):
        schedule_of("sarathi:tokens=x")
    assert poisson(9, 2.0, seed=1) == poisson(9, 2.0, seed=1) != poisson(9, 2.0, seed=2)
    assert replace(COSTS, call=0).prompt(4, 0, 0.5) == 2 * replace(COSTS, call=0).prompt(4, 0)
