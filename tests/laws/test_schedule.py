"""What schedules hold to, in simulation: no block is lost, no plan is above its budget, nobody starves."""

from dataclasses import dataclass, replace

import numpy as np
import pytest

from accel.ir.axis import find_axes
from accel.ir.errors import AccelError
from accel.runtime.schedule import Limits, Plan, State, Task
from accel.runtime.schedule.continuous_batching import ContinuousBatching
from accel.runtime.schedule.sarathi import Sarathi
from accel.runtime.serve.ledger import Ledger

AXIS = find_axes()["schedule"]
NAMES = AXIS.names()
LIMITS = [
    Limits(rows=4, blocks=400),
    Limits(rows=8, blocks=20, block=4),
    Limits(rows=8, blocks=20, block=4, recompute=False),
    Limits(rows=3, blocks=24, block=8, step=5),
]


@dataclass
class Simulation:
    """An engine without a model: every request runs as planned, and ends when it has made its tokens."""

    schedule: object
    limits: Limits

    def run(self, requests, arrivals):
        """requests: (prompt, new tokens); arrivals: before which step each comes. The plans, and when each ended."""
        limits, ledger = self.limits, Ledger(self.limits.blocks)
        waiting, running, plans, ended, refused = [], [], [], {}, set()
        left = dict(enumerate(requests))
        made = dict.fromkeys(left, 0)
        step = 0
        while left or waiting or running:
            for i in [i for i in left if arrivals[i] <= step]:
                prompt, new = left.pop(i)
                waiting.append(Task(i, prompt, prompt + new, arrived=float(step)))
            state = State(tuple(waiting), tuple(running), ledger.free, float(step))
            plan = self.schedule.plan(state, limits)
            self.check(plan, state)
            known = {task.id: task for task in (*waiting, *running)}
            for i in plan.preempted:
                ledger.drop(i)
                task = known[i]
                again = task.length if not task.decodes else task.computed
                known[i] = replace(task, computed=0, length=again, blocks=0)
            back = sorted(plan.preempted)
            refused |= set(plan.refused)
            ledger.reserve(plan.blocks)
            ledger.check()
            ledger.commit()
            for i, size in plan.chunks:
                known[i] = replace(known[i], computed=known[i].computed + size)
            for i in plan.decodes:
                new = min(limits.step, requests[i][1] - made[i])
                made[i] += new
                known[i] = replace(known[i], computed=known[i].computed + new)
            runs = [t.id for t in running if t.id not in back]
            runs += [i for i, _ in plan.chunks if i not in runs]
            for i in [i for i in runs if made[i] == requests[i][1]]:
                runs.remove(i)
                ledger.drop(i)
                ended[i] = step
            waits = [t.id for t in waiting if t.id not in runs and t.id not in ended]
            waits = [i for i in (*back, *waits) if i not in refused]
            tasks = {i: replace(known[i], blocks=ledger.owned(i)) for i in (*runs, *waits)}
            running, waiting = [tasks[i] for i in runs], [tasks[i] for i in waits]
            for task in running:
                assert limits.needs(task.computed) <= task.blocks, "it holds more than its blocks"
            ledger.check()
            plans.append(plan)
            step += 1
            assert step < 2000, "somebody waits for good"
        assert ledger.free == limits.blocks, "a block is left with nobody"
        assert set(ended) | refused == set(range(len(requests)))
        return plans, ended, refused

    def check(self, plan, state):
        """One plan against its budget and the queue."""
        limits = self.limits
        going = [t for t in state.running if t.id not in plan.preempted]
        assert set(plan.decodes) == {t.id for t in going if t.decodes}, "a request is skipped"
        assert sum(plan.blocks.values()) <= state.free + sum(
            t.blocks for t in state.running if t.id in plan.preempted
        ), "more blocks than there are"
        admitted = [i for i, _ in plan.chunks if i not in {t.id for t in going}]
        assert len(going) + len(admitted) <= limits.rows, "more rows than there are"
        assert limits.recompute or not plan.preempted, "what cannot run again is preempted"
        tasks = {t.id: t for t in (*state.waiting, *state.running)}
        assert all(0 < size <= tasks[i].length - tasks[i].computed for i, size in plan.chunks)
        if not self.schedule.chunks:
            assert all(size == tasks[i].length for i, size in plan.chunks), "a prompt is split"
        order = [t.id for t in state.waiting if t.id not in plan.refused]
        if not self.schedule.overtakes:
            assert admitted == order[: len(admitted)], "somebody is passed over"
        tokens = getattr(self.schedule, "tokens", None)
        if tokens is not None:
            decoded = limits.step * len(plan.decodes)
            used = decoded + sum(size for _, size in plan.chunks)
            if self.schedule.splits_cores:  # the budget is of a call of prompts
                used -= decoded
            assert used <= max(tokens, decoded), "above the budget"


def traffic(seed, count=24):
    rng = np.random.default_rng(seed)
    requests = [(int(rng.integers(1, 60)), int(rng.integers(1, 30))) for _ in range(count)]
    arrivals = np.cumsum(rng.integers(0, 6, count) * (rng.random(count) < 0.6)).tolist()
    return requests, arrivals


def build(name):
    return AXIS.build(name, **({"tokens": 40} if AXIS.method(name).chunks else {}))


@pytest.mark.parametrize("limits", LIMITS, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_every_schedule(name, limits):
    preempted = 0
    for seed in range(4):
        plans, _, refused = Simulation(build(name), limits).run(*traffic(seed))
        preempted += sum(len(plan.preempted) for plan in plans)
        fits = [limits.fits(Task(i, p, p + n)) for i, (p, n) in enumerate(traffic(seed)[0])]
        assert [i not in refused for i in range(len(fits))] == fits, "not now is not never"
    if limits.recompute and limits.rows == 8:
        assert preempted, "blocks never ran out"


@pytest.mark.parametrize("limits", LIMITS, ids=str)
def test_a_budget_for_all_prompts_is_continuous_batching(limits):
    for seed in range(4):
        whole = Sarathi(tokens=60 * 24 + limits.rows * limits.step)
        assert Simulation(whole, limits).run(*traffic(seed)) == Simulation(
            ContinuousBatching(), limits
        ).run(*traffic(seed))


def test_a_chunk_of_the_longest_prompt_is_continuous_batching():
    """Where prompts come one at a time."""
    for seed in range(4):
        requests, _ = traffic(seed)
        arrivals = list(range(len(requests)))
        limits = Limits(rows=24, blocks=400)
        longest = max(prompt for prompt, _ in requests)
        one = Simulation(Sarathi(tokens=longest + limits.rows), limits).run(requests, arrivals)
        assert one == Simulation(ContinuousBatching(), limits).run(requests, arrivals)
        assert one != Simulation(Sarathi(tokens=8), limits).run(requests, arrivals)


def test_chunks_never_stall_those_that_decode():
    """While a long prompt runs, others get a token in each iteration, which is no longer than its budget."""
    requests, arrivals = [(4, 200), (4, 200), (2000, 4)], [0, 0, 5]
    limits = Limits(rows=4, blocks=1000)
    plans, _, _ = Simulation(Sarathi(tokens=64), limits).run(requests, arrivals)
    during = [plan for plan in plans if dict(plan.chunks).get(2)]
    assert len(during) == -(-2000 // 62) and all(set(plan.decodes) == {0, 1} for plan in during)
    plans, _, _ = Simulation(ContinuousBatching(), limits).run(requests, arrivals)
    assert max(size for plan in plans for _, size in plan.chunks) == 2000


class Loses(ContinuousBatching):
    """It plans more blocks than there are."""

    def plan(self, state, limits):
        return super().plan(replace(state, free=state.free + 4), limits)


class Forgets(ContinuousBatching):
    """Those that decode get no further blocks."""

    def plan(self, state, limits):
        plan = super().plan(state, limits)
        return replace(plan, blocks={i: n for i, n in plan.blocks.items() if i not in plan.decodes})


class Starves(ContinuousBatching):
    """The latest request that waits comes first."""

    def plan(self, state, limits):
        return super().plan(replace(state, waiting=state.waiting[::-1]), limits)


class Skips(ContinuousBatching):
    def plan(self, state, limits):
        plan = super().plan(state, limits)
        return replace(plan, decodes=plan.decodes[1:] if state.now % 2 else plan.decodes)


class Waits(ContinuousBatching):
    """It never refuses, so that what can never fit waits."""

    def plan(self, state, limits):
        return replace(super().plan(state, limits), refused=())


class Splits(Sarathi):
    """A chunk takes no heed of those that decode."""

    def plan(self, state, limits):
        plan = super().plan(replace(state, running=()), limits)
        return replace(super().plan(state, limits), chunks=plan.chunks, blocks=plan.blocks)


@pytest.mark.parametrize("kind", [Loses, Forgets, Starves, Skips, Waits, Splits])
def test_a_broken_schedule_is_caught(kind):
    with pytest.raises((AssertionError, AccelError)):
        for seed in range(4):
            Simulation(kind(), LIMITS[1]).run(*traffic(seed))


def patience(schedule):
    """A long prompt in a stream of short ones, which alone fill each step, does not wait for the end of them."""
    requests, arrivals = [(120, 1), *[(20, 1)] * 200], [3, *range(200)]
    _, ended, _ = Simulation(schedule, Limits(rows=4, blocks=400)).run(requests, arrivals)
    assert ended[0] < 100, "somebody starves"


@pytest.mark.parametrize("name", NAMES)
def test_nobody_starves(name):
    patience(build(name))


def test_a_schedule_that_starves_is_caught():
    with pytest.raises(AssertionError, match="starves"):
        patience(AXIS.build("nexus", tokens=20, aging=1e-9))


def test_a_lost_block_is_found():
    ledger = Ledger(8)
    ledger.reserve({1: 3})
    ledger.commit()
    ledger.check()
    ledger._owned[1] -= 1
    with pytest.raises(AccelError, match="5 free . 0 reserved . 2 owned blocks are not 8"):
        ledger.check()
    with pytest.raises(AccelError, match="plans 6 more blocks, but 5 are free"):
        ledger.reserve({2: 6})


def test_plans_are_empty_where_nothing_is_to_do():
    for name in NAMES:
        plan = AXIS.build(name).plan(State((), (), 9), LIMITS[0])
        assert plan == Plan([], [], [], [], {})
