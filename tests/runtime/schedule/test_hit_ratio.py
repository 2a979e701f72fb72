"""hit-ratio: prompts that are known for the most part run first, nobody waits for good, and tokens do not change."""

import threading
from dataclasses import replace

import numpy as np
import pytest

from accel.ir.errors import RecipeError
from accel.runtime.decode.sampling_params import SamplingParams
from accel.runtime.schedule import Limits, State, Task
from accel.runtime.schedule.continuous_batching import ContinuousBatching
from accel.runtime.schedule.hit_ratio import HitRatio
from accel.runtime.serve.batcher import Batcher
from accel.runtime.serve.engine import Engine, Request

from ...laws.test_schedule import Simulation, traffic
from ...prefill_case import built

LIMITS = Limits(rows=4, blocks=400)


def by_hand(waiting, now, work, aging, rows):
    """Again and again the request with the largest share known, and of equals the earlier, while there is work."""
    left, used, found = list(waiting), 0, []
    while left and len(found) < rows:
        best = left[0]
        for task in left[1:]:
            a, b = (t.hits / t.length + aging * (now - t.arrived) for t in (task, best))
            if a > b or (a == b and task.id < best.id):
                best = task
        new = best.length - best.hits
        if found and used + new > work:
            break
        used += new
        found.append(best.id)
        left.remove(best)
    return found


def law(schedule):
    rng, overtaken = np.random.default_rng(0), 0
    for _ in range(100):
        waiting = []
        for i in range(int(rng.integers(1, 9))):
            length = int(rng.integers(1, 60))
            hits, arrived = int(rng.integers(0, length)), float(rng.integers(0, 6))
            waiting.append(Task(i, length, length + 5, arrived=arrived, hits=hits))
        plan = schedule.plan(State(waiting, [], LIMITS.blocks, 6.0), LIMITS)
        want = by_hand(waiting, 6.0, 60, 0.1, LIMITS.rows)
        assert [i for i, _ in plan.chunks] == want
        overtaken += want != sorted(want)
    assert overtaken > 30


def test_the_order_is_that_of_hits():
    law(HitRatio(work=60))
    with pytest.raises(AssertionError):
        law(ContinuousBatching())
    with pytest.raises(AssertionError):
        law(HitRatio(work=60, aging=0.5))


@pytest.mark.parametrize("aging", [0.1, 1e-9])
def test_nobody_is_passed_over_for_good(aging):
    """A request of which nothing is known, among hits that come all the time; without aging it waits for all."""
    limits, requests = Limits(rows=1, blocks=400), [(40, 1)] + [(20, 1)] * 80
    schedule = HitRatio(aging=aging)

    class Known(HitRatio):
        def plan(self, state, limits):
            known = [replace(t, hits=19 if t.length == 20 else 0) for t in state.waiting]
            return schedule.plan(replace(state, waiting=known), limits)

    arrivals = [0] + [i // 2 for i in range(80)]
    _, ended, _ = Simulation(Known(), limits).run(requests, arrivals)
    assert (ended[0] < max(ended.values()) / 2) == (aging == 0.1)


def test_without_hits_it_is_first_come_first_served():
    for seed in range(3):
        runs = (Simulation(one, LIMITS).run(*traffic(seed)) for one in (HitRatio(), ContinuousBatching()))  # fmt: skip
        assert next(runs)[1:] == next(runs)[1:]


@pytest.mark.parametrize(("option", "value"), [("work", 0), ("aging", 0.0)])
def test_bad_options(option, value):
    with pytest.raises(RecipeError, match=option):
        HitRatio(**{option: value})


REUSE = {"kvshare": {"use": "kvshare", "least": 8}, "paged-prefix": {"use": "paged-prefix"}}


@pytest.mark.parametrize("reuse", REUSE)
def test_an_engine_runs_known_prompts_first(reuse, monkeypatch):
    """Misses and hits come by turns while another request runs; each gets what it gets alone."""
    rng, ran, right = np.random.default_rng(4), [], Batcher._run_prompt
    tables = {"kv.reuse": REUSE[reuse], "schedule": {"use": "hit-ratio", "work": 30}}
    model = built("llama", tables=tables)
    form = rng.integers(3, 50, 32)
    new = [rng.integers(3, 50, 36) for _ in range(4)]
    known = [np.concatenate([form, rng.integers(3, 50, 4)]) for _ in range(4)]
    begun, all_wait = threading.Event(), threading.Event()
    with model.session() as session:
        session.prompt(form[None])

    def run(self, job, tokens, threads=None):
        begun.set()
        assert all_wait.wait(60)
        ran.append(job.id)
        right(self, job, tokens, threads)

    monkeypatch.setattr(Batcher, "_run_prompt", run)
    params = SamplingParams(max_tokens=3)
    with Engine(model, max_batch=1) as engine:
        first = engine.submit(Request(rng.integers(3, 50, 20), params))
        assert begun.wait(60)
        prompts = [p for pair in zip(new, known, strict=True) for p in pair]
        tickets = [engine.submit(Request(p, params)) for p in prompts]
        all_wait.set()
        got = [[event.token for event in ticket] for ticket in tickets]
        assert list(first)
        assert engine.stats["reused_tokens_total"] > 100
    assert ran == [0, 2, 4, 6, 8, 1, 3, 5, 7]
    if reuse == "paged-prefix":
        plain = built("llama")
        assert got == [plain.generate(p, 3).tokens[0] for p in prompts]
