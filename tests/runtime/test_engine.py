"""An engine: each request gets the tokens that it gets alone, whatever comes, goes and fails beside it."""

import threading
from dataclasses import replace

import numpy as np
import pytest

import accel
from accel.ir.errors import AccelError, InputError, OutOfMemoryError
from accel.runtime.decode.context import DecodeContext
from accel.runtime.decode.rounds import Rounds
from accel.runtime.decode.sampling_params import SamplingParams
from accel.runtime.loop.speculative import _Rounds as RoundsOfDrafts
from accel.runtime.schedule.continuous_batching import ContinuousBatching
from accel.runtime.serve.engine import Engine, Full, Request
from accel.runtime.serve.job import Job
from accel.runtime.session.session import Session

from ..kv_case import recipe
from ..once import made_once
from ..prefill_case import built

BATCH = 4
LOOPS = {
    "plain": {"loop": {"use": "autoregressive"}},
    "sarathi": {"schedule": {"use": "sarathi", "tokens": 7}},
    "drafts": {
        "loop": {"use": "speculative"},
        "draft": {"use": "prompt-lookup"},
        "verify": {"use": "sample-match"},
        "length": {"use": "fixed"},
        "schedule": {"use": "sarathi", "tokens": 16},
    },
    "jacobi": {"loop": {"use": "jacobi", "block": 3}},
    "search": {"loop": {"use": "first-finish", "samples": 2}},
    "fastcot": {"loop": {"use": "fastcot", "passes": 3}},
}


@pytest.fixture(scope="module")
def opened(toy, tmp_path_factory):
    """opened(recipe) -> the toy, for more rows."""

    def get(name="plain"):
        folder = tmp_path_factory.mktemp("engine") / name
        return accel.load(toy.write(folder, LOOPS[name], max_batch=BATCH, max_context=200))

    with made_once(get) as found:
        yield found


def requests(count=9, **more):
    """Of several lengths, half of them sampled."""
    found = []
    for i in range(count):
        rng = np.random.default_rng(i)
        prompt = np.tile(rng.integers(1, 320, 4 + i), 3)[: 5 + 4 * i]
        params = SamplingParams(
            max_tokens=3 + 5 * (i % 4),
            temperature=0.8 * (i % 2),
            top_k=20 if i % 2 else None,
            seed=i,
            logprobs=1 if i % 3 == 0 else None,
            stop=["e"] if i % 4 == 1 else None,
            **more,
        )
        found.append(Request(prompt, params))
    return found


def law(model, engine, asked):
    """Events of all requests, against `generate`; what they used."""
    tickets = [engine.submit(one) for one in asked]
    for ticket, one in zip(tickets, asked, strict=True):
        events, want = list(ticket), model.generate(one.prompt, sampling_params=one.params)
        assert [e.token for e in events] == want.tokens[0], "tokens of another"
        assert "".join(e.text for e in events) == want.text[0]
        assert [e.finish for e in events] == [None] * (len(events) - 1) + want.finish_reason
        assert ticket.stop_reason == want.stop_reason[0]
        assert (ticket.usage.prompt_tokens, ticket.usage.completion_tokens) == (
            one.prompt.size,
            len(events),
        )
        if one.params.logprobs is not None:
            near = [
                (e.logprobs[t].logprob, p[t].logprob)
                for e, p in zip(events, want.logprobs[0], strict=True)
                for t in p
            ]
            assert np.allclose(*zip(*near, strict=True), atol=1e-3)
    return [ticket.usage for ticket in tickets]


@pytest.mark.parametrize("name", LOOPS)
def test_requests_get_the_tokens_that_they_get_alone(opened, name):
    model = opened(name)
    asked = requests()
    if name in ("search", "fastcot"):
        asked = [replace(o, params=replace(o.params, logprobs=None, stop=None)) for o in asked]
    with Engine(model) as engine:
        turns = "take turns" in engine.how
        assert turns == (name in ("search", "fastcot")), engine.how
        used = law(model, engine, asked)
        assert engine.stats["kv_bytes"] == 0 and engine.stats["running"] == 0
        for one in ("drafted", "accepted"):
            told = [getattr(each, one) for each in used]
            assert sum(told) == engine.stats[f"{one}_total"]
            assert any(told) == (name in ("drafts", "jacobi", "fastcot"))
        assert all(each.accepted < each.completion_tokens for each in used)
        assert engine.stats["requests_total"] == len(asked)
        by_position(engine.stats)


def by_position(stats):
    """Of drafts by the tokens at each position: as many in all, no later one is more, and a draft has a first one."""
    for name in ("drafted", "accepted"):
        key = f"draft_{name}_total/"
        count = sum(one.startswith(key) for one in stats)
        told = [stats[f"{key}{position}"] for position in range(1, count + 1)]
        assert told == sorted(told, reverse=True) and sum(told) == stats[f"{name}_total"], name
    assert stats.get("draft_drafted_total/1", 0) == stats["drafts_total"]


def test_blocks_run_out_and_requests_run_again(opened):
    """Rows lose what they hold, and go on where they were, samples too."""
    asked = [
        Request(one.prompt, replace(one.params, max_tokens=50, stop=None, ignore_eos=True))
        for one in requests(5)
    ]
    for name in ("plain", "sarathi", "drafts"):
        model = opened(name)
        with Engine(model, blocks=8) as engine:
            law(model, engine, asked)
            assert engine.stats["preemptions_total"] > 0
            assert engine._batcher.ledger.free == 8
    with Engine(opened(), blocks=2) as engine, pytest.raises(InputError, match="has room for 32"):
        engine.submit(Request(np.arange(1, 30), SamplingParams(max_tokens=9)))


@pytest.mark.long
def test_prompts_that_end_in_eviction_run_in_chunks_and_again(monkeypatch):
    """A request that runs again drops the tokens of its prompt that it had dropped; one that drops none is caught."""
    tables = recipe(kept=8) | {"schedule": {"use": "sarathi", "tokens": 9}}
    model, rng = built("llama", tables=tables), np.random.default_rng(2)
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    asked = [Request(rng.integers(3, 50, size), params) for size in (14, 15)]
    want = [model.generate(one.prompt, sampling_params=params).tokens[0] for one in asked]
    for broken in (False, True):
        if broken:
            monkeypatch.setattr(Job, "ahead", 0)
        with Engine(model, blocks=3) as engine:
            assert "in chunks" in engine.how
            tickets = [engine.submit(one) for one in asked]
            got = [[event.token for event in ticket] for ticket in tickets]
            assert engine.stats["preemptions_total"] > 0
        assert (got == want) == (not broken)


def test_cancelled_requests_leave_and_others_go_on(opened):
    """From several threads, at random moments; memory is back at its start."""
    model, wrong = opened("sarathi"), []
    want = [model.generate(o.prompt, sampling_params=o.params).tokens[0] for o in requests()]

    def client(engine, seed):
        rng = np.random.default_rng(seed)
        try:
            for _ in range(4):
                i = int(rng.integers(len(want)))
                ticket = engine.submit(requests()[i])
                stop = int(rng.integers(1, 40))
                got = []
                for event in ticket:
                    got += [event.token] if event.token >= 0 else []
                    if len(got) == stop:
                        ticket.cancel()
                assert got == want[i][: len(got)] and event.finish is not None
                assert event.finish == "cancelled" or got == want[i]
        except BaseException as error:
            wrong.append(error)

    with Engine(model, max_batch=3) as engine:
        threads = [threading.Thread(target=client, args=(engine, seed)) for seed in range(5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not wrong, wrong[0]
    assert engine.stats["kv_bytes"] == engine.stats["running"] == engine.stats["waiting"] == 0
    engine._batcher.ledger.check()
    assert engine._batcher.ledger.free == engine._batcher.ledger.blocks


@pytest.mark.parametrize("at", [0, 3])
def test_a_request_that_fails_fails_alone(opened, at):
    model = opened()

    def breaks(ids, logits):
        if ids.size == 5 + at:
            raise ZeroDivisionError("no")
        return logits

    asked = requests(5)
    bad = Request(np.arange(1, 6), SamplingParams(max_tokens=20, logits_processors=[breaks]))
    with Engine(model) as engine:
        others = [engine.submit(one) for one in asked[:2]]
        ticket, got = engine.submit(bad), []
        with pytest.raises(InputError, match="raised ZeroDivisionError"):
            for event in ticket:
                got.append(event)
        assert len(got) == at and list(ticket) == []
        law(model, engine, asked[2:])
        for one, other in zip(asked, others, strict=False):
            want = model.generate(one.prompt, sampling_params=one.params).tokens[0]
            assert [event.token for event in other] == want


def failing(monkeypatch, error, when):
    """Rounds' calls fail where `when(rows that run, calls before)`; how many did."""
    calls, failed = [], []
    for kind, name in ((Rounds, "_call"), (RoundsOfDrafts, "_called")):
        call = getattr(kind, name)

        def fails(self, live, *given, call=call):
            calls.append(len(live))
            if when(len(live), len(calls)):
                failed.append(len(live))
                raise error
            return call(self, live, *given)

        monkeypatch.setattr(kind, name, fails)
    return failed


def ends(tickets):
    """Why each request ended."""
    found = []
    for ticket in tickets:
        try:
            found.append(list(ticket)[-1].finish)
        except Exception as error:
            found.append(type(error).__name__)
    return found


def test_a_call_that_fails_ends_its_group_and_the_engine_goes_on(opened, monkeypatch):
    failing(monkeypatch, ZeroDivisionError("no"), lambda rows, calls: calls == 2)
    with Engine(opened()) as engine:
        told = ends([engine.submit(one) for one in requests(2, ignore_eos=True)])
        assert "ZeroDivisionError" in told
        law(opened(), engine, requests(3))


@pytest.mark.parametrize(("name", "most"), [("plain", 2), ("drafts", 1)])
def test_where_memory_runs_out_the_newest_request_runs_again(opened, monkeypatch, name, most):
    """Whenever more than so many rows run: all get their tokens; where even one row is too many, each request ends."""
    model, no_room = opened(name), OutOfMemoryError("no room")
    asked = requests(6, ignore_eos=True)
    want = [model.generate(one.prompt, sampling_params=one.params).tokens[0] for one in asked]
    with pytest.MonkeyPatch.context() as patch, Engine(model) as engine:
        failed = failing(patch, no_room, lambda rows, calls: rows > most)
        tickets = [engine.submit(one) for one in asked]
        assert [[event.token for event in ticket] for ticket in tickets] == want
        assert engine.stats["preemptions_total"] == len(failed) > 0
    assert engine._batcher.ledger.free == engine._batcher.ledger.blocks
    with Engine(model) as engine:
        failing(monkeypatch, no_room, lambda rows, calls: True)
        tickets = [engine.submit(one) for one in asked]
        assert ends(tickets) == ["OutOfMemoryError"] * len(asked)
    assert engine.stats["running"] == engine.stats["kv_bytes"] == 0


def test_where_memory_runs_out_in_a_prompt_it_runs_again(opened, monkeypatch):
    model, prompt = opened("sarathi"), Session.prompt
    asked = requests(5, ignore_eos=True)
    want = [model.generate(one.prompt, sampling_params=one.params).tokens[0] for one in asked]
    engine, failed = Engine(model), []

    def fails(self, tokens, lengths=None):
        if len(engine._batcher.running) > 1 and len(failed) < 3:
            failed.append(1)
            raise MemoryError("no room")
        return prompt(self, tokens, lengths)

    monkeypatch.setattr(Session, "prompt", fails)
    with engine:
        tickets = [engine.submit(one) for one in asked]
        assert [[event.token for event in ticket] for ticket in tickets] == want
        assert engine.stats["preemptions_total"] == len(failed) == 3


def test_a_round_that_took_tokens_before_memory_ran_out_is_not_run_again(opened, monkeypatch):
    """The rows would lose some."""

    def fails(self):
        taken = run_(self)
        if len(self.rows) > 1:
            raise MemoryError("no room")
        return taken

    rounds = type(opened()._loop.rounds(opened().session(), [], DecodeContext()))
    run_ = rounds.run
    monkeypatch.setattr(rounds, "run", fails)
    with Engine(opened()) as engine:
        told = ends([engine.submit(one) for one in requests(4, ignore_eos=True)])
        assert told.count("MemoryError") > 1 and engine.stats["preemptions_total"] == 0


class Idle(ContinuousBatching):
    def plan(self, state, limits):
        return replace(super().plan(state, limits), chunks=(), blocks={})


class Greedy(ContinuousBatching):
    def plan(self, state, limits):
        return super().plan(replace(state, free=10**6), limits)


@pytest.mark.parametrize(("kind", "why"), [(Idle, "plans nothing"), (Greedy, "more blocks, but")])
def test_a_broken_schedule_leaves_no_request_without_an_end(opened, monkeypatch, kind, why):
    with Engine(opened(), blocks=6) as engine:
        engine._batcher.schedule = kind()
        with engine._queue.changed:  # it plans when all are there
            tickets = [
                engine.submit(Request(np.arange(1, 30), SamplingParams(max_tokens=20)))
                for _ in range(3)
            ]
        failed = 0
        for ticket in tickets:
            try:
                list(ticket)
            except AccelError as error:
                failed += why in str(error)
        assert failed and engine.stats["kv_bytes"] == 0


def test_a_row_that_takes_anothers_place_is_caught(opened, monkeypatch):
    monkeypatch.setattr(
        Rounds, "join", lambda self, other: (swap(self, other), self.joined(other))[1]
    )

    def swap(self, other):
        self._session.join(other._session)
        self._rows[:0] = other._rows

    with pytest.raises(AssertionError), Engine(opened()) as engine:
        law(opened(), engine, requests(6))


def test_not_now_and_never(opened):
    model = opened()
    long = SamplingParams(max_tokens=150, ignore_eos=True)
    with Engine(model, max_batch=1, max_waiting=2) as engine:
        tickets = []
        with pytest.raises(Full, match="2 requests wait already"):
            for _ in range(9):
                tickets.append(engine.submit(Request([1, 2, 3], long)))
        for prompt, params, why in (
            ([], long, "empty"),
            ([999], long, "999"),
            (np.ones(200, int), long, "leaves no room"),
            ([1], replace(long, n=2, temperature=1.0), "n = 2"),
        ):
            with pytest.raises(InputError, match=why):
                engine.submit(Request(prompt, params))
        for ticket in tickets:
            ticket.cancel()
            assert list(ticket)[-1].finish == "cancelled"
        engine.close()
        with pytest.raises(InputError, match="closed"):
            engine.submit(Request([1], long))
    for wrong in (0, 99):
        with pytest.raises(InputError, match="max_batch"):
            Engine(model, max_batch=wrong)


def test_closing_drains_or_cancels(opened):
    model = opened()
    long = SamplingParams(max_tokens=150, ignore_eos=True)
    for drain, timeout in ((True, None), (True, 0.0), (False, None)):
        engine = Engine(model)
        tickets = [engine.submit(Request([1, 2, i], long)) for i in range(1, 7)]
        engine.close(drain=drain, timeout=timeout)
        ends = [list(ticket)[-1].finish for ticket in tickets]
        assert (ends == ["length"] * 6) == (drain and timeout is None)
        assert set(ends) <= {"length", "cancelled"}
        assert not engine._thread.is_alive()


def test_samples_are_those_of_generate(opened):
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=5)
    want = opened().generate([3, 1, 4], sampling_params=replace(params, n=3)).tokens
    with Engine(opened()) as engine:
        tickets = [engine.submit(Request([3, 1, 4], params, sample=i)) for i in range(3)]
        assert [[e.token for e in ticket] for ticket in tickets] == want
