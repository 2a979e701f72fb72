"""nexus: prompts run beside rounds, on a part of the cores; tokens do not change, and its shares keep their bounds."""

import threading

import numpy as np
import pytest

import accel
from accel.ir.errors import RecipeError
from accel.runtime.decode.sampling_params import SamplingParams
from accel.runtime.model.compiled import CompiledModel
from accel.runtime.schedule import Limits, State, Task
from accel.runtime.schedule.nexus import Nexus
from accel.runtime.serve.batcher import Batcher
from accel.runtime.serve.engine import Engine, Request

LIMITS = Limits(rows=8, blocks=100)
SHARES = [k / 8 for k in range(1, 8)]


def state(backlog, rows, free):
    """Tokens of prompts that wait, requests that decode, free blocks."""
    running = [Task(i, 16, 99, 32, 2) for i in range(rows)]
    return State([Task(99, backlog, backlog + 1)], running, free)


def law(schedule):
    """Below the threshold, a larger backlog never lowers the share of prompts; what decodes keeps its bound."""
    for rows in (1, 4, 8):
        for now in (0.0, *SHARES):
            found = []
            for backlog in (1, 30, 300, 3000):
                found.append(schedule.share(state(backlog, rows, 80), LIMITS, SHARES, now))
                assert found[-1] in SHARES
            assert found == sorted(found), "a larger backlog lowers the share of prompts"
            best = min(schedule.seconds(rows, 1 - r) for r in SHARES)
            if now == 0:
                assert schedule.seconds(rows, 1 - found[-1]) <= (1 + schedule.round_slack) * best


def test_shares():
    law(Nexus())
    law(Nexus(hysteresis=0.3, bandwidth=0.9))
    schedule = Nexus()
    few, most = (schedule.share(state(300, 4, free), LIMITS, SHARES, 0.0) for free in (90, 10))
    assert few > most, "full memory gives cores to those that decode"
    near = schedule.share(state(300, 4, 90), LIMITS, SHARES, few - 0.1)
    assert near == few - 0.1 or near == few
    assert (
        Nexus(hysteresis=0.2).share(state(300, 4, 90), LIMITS, SHARES, few - 0.125) == few - 0.125
    )
    assert schedule.share(state(300, 4, 90), LIMITS, [0.5], 0.0) == 0.5


def test_a_share_that_falls_is_caught():
    class Falls(Nexus):
        def share(self, state, limits, shares, now):
            tokens = sum(t.length for t in state.waiting)
            return shares[0] if tokens > 100 else shares[-1]

    with pytest.raises(AssertionError, match="lowers"):
        law(Falls())


@pytest.mark.parametrize(
    ("option", "value"), [("tokens", 0), ("aging", 0.0), ("bandwidth", -1.0), ("round_slack", -0.1)]
)
def test_bad_options(option, value):
    with pytest.raises(RecipeError, match=option):
        Nexus(**{option: value})


# For real

DRAFTS = {
    "loop": {"use": "speculative"},
    "draft": {"use": "prompt-lookup"},
    "verify": {"use": "sample-match"},
    "length": {"use": "fixed"},
}


def opened(toy, folder, **more):
    tables = {"schedule": {"use": "nexus", "tokens": 7}, **more}
    return accel.load(toy.write(folder, tables, max_batch=4, max_context=200), threads=2)


@pytest.fixture(scope="module")
def model(toy, tmp_path_factory):
    with opened(toy, tmp_path_factory.mktemp("nexus") / "artifact") as model:
        yield model


def test_drafts_go_on_beside_prompts(toy, tmp_path, monkeypatch):
    monkeypatch.setattr(CompiledModel, "costs", None)  # nothing weighs whether drafts pay
    repeats = Request(np.tile(np.arange(1, 8), 6), SamplingParams(max_tokens=24))
    with opened(toy, tmp_path / "drafts", **DRAFTS) as model, Engine(model) as engine:
        served(model, engine, [repeats, *asked()])
        assert engine.stats["drafted_total"] > 0


def asked(count=9):
    found = []
    for i in range(count):
        prompt = np.random.default_rng(i).integers(1, 320, 5 + 9 * (i % 5))
        params = SamplingParams(
            max_tokens=3 + 9 * (i % 4),
            temperature=0.8 * (i % 2),
            seed=i,
            logprobs=1 if i % 3 == 0 else None,
        )
        found.append(Request(prompt, params))
    return found


def served(model, engine, requests):
    tickets = [engine.submit(one) for one in requests]
    for one, ticket in zip(requests, tickets, strict=True):
        want = model.generate(one.prompt, sampling_params=one.params)
        assert [event.token for event in ticket] == want.tokens[0], "tokens of another"


def test_tokens_are_those_alone_and_prompts_run_beside(model, monkeypatch):
    seen, right = set(), Batcher._run_prompt

    def run(self, job, tokens, threads=None):
        busy = bool(self._groups)
        right(self, job, tokens, threads)
        seen.add((threading.current_thread().name.startswith("accel-prompts"), threads, busy))

    monkeypatch.setattr(Batcher, "_run_prompt", run)
    for blocks in (None, 8):  # enough, and so few that requests run again
        with Engine(model, blocks=blocks) as engine:
            assert "on a part of 2 cores while others decode" in engine.how
            served(model, engine, asked())
            ticket = engine.submit(Request(np.arange(1, 60), SamplingParams(max_tokens=50)))
            ticket.cancel()
            assert list(ticket)[-1].finish == "cancelled"
            assert engine.stats["kv_bytes"] == engine.stats["running"] == 0
            assert engine._batcher.ledger.free == engine._batcher.ledger.blocks
    assert {(True, 1, True), (True, 2, False)} <= seen, seen


def test_a_prompt_that_fails_fails_alone(model, monkeypatch):
    def breaks(ids, logits):
        raise ZeroDivisionError("no")

    bad = Request(np.arange(1, 30), SamplingParams(max_tokens=9, logits_processors=[breaks]))
    right = Batcher._run_prompt
    with Engine(model) as engine:
        ticket = engine.submit(bad)
        served(model, engine, asked(3))
        with pytest.raises(Exception, match="ZeroDivisionError"):
            list(ticket)

        def fails(self, job, tokens, threads=None):
            if job.row.prompt.size == 29:
                raise MemoryError("no room")
            right(self, job, tokens, threads)

        monkeypatch.setattr(Batcher, "_run_prompt", fails)
        ticket = engine.submit(Request(np.arange(1, 30)))
        served(model, engine, asked(3))
        with pytest.raises(MemoryError):
            list(ticket)


def test_closing_while_a_prompt_runs(model):
    engine = Engine(model)
    tickets = [
        engine.submit(Request(np.arange(1, 150), SamplingParams(max_tokens=40))) for _ in range(3)
    ]
    engine.close(drain=False)
    assert {list(ticket)[-1].finish for ticket in tickets} <= {"cancelled", "length"}
    assert not engine._thread.is_alive()
