"""Ranks that are processes of their own, over one artifact."""

import os
import signal
import threading

import pytest

import accel
from accel.ir.errors import AccelError
from accel.runtime.session.prompt.ranks import PromptRanks

from .laws.test_prefill_ranks import FORMS, prompted
from .prefill_case import LENGTHS, TOKENS, built, far

TABLE = {"use": "cp-ring", "ranks": 2, "least": 4, "processes": True}


@pytest.fixture(scope="module")
def artifact():
    return built("llama", "onnx", {"prefill.ranks": TABLE}).artifact.path


def crew(session):
    return session.observer(PromptRanks).crew


def killed_within(pid):
    """A process that stands still, and dies while the others wait for it."""
    os.kill(pid, signal.SIGSTOP)
    threading.Timer(0.2, os.kill, (pid, signal.SIGKILL)).start()


@pytest.mark.long
def test_processes_give_what_the_step_gives(artifact):
    """Two processes: logits, bytes, greedy tokens; one that is killed in a prompt."""
    base = built("llama", "onnx")
    prompts = [list(row[:n]) for row, n in zip(TOKENS, LENGTHS, strict=True)]
    turns = {"prefill.ranks": {**TABLE, "processes": False}}
    want, figures = prompted(built("llama", "eager", turns))
    with accel.load(artifact) as model:
        got, stats = prompted(model)
        assert far(got, want) < 1e-4 and far(got, prompted(base)[0]) < 1e-5
        assert stats["exchanged_bytes"] == figures["exchanged_bytes"]
        out = model.generate(prompts, 6, eos=[])
        assert out.tokens == base.generate(prompts, 6, eos=[]).tokens
        assert out.stats["exchanged_bytes"] > 0
        with model.session(1) as session:
            ranks = crew(session)
            session.prompt(TOKENS[:1, :9])
            first = ranks.pids
            killed_within(first[1])
            with pytest.raises(
                AccelError, match=r"rank 1 of 2 ended \(exit code -9\).*as before"
            ) as error:
                session.prompt(TOKENS[:1, 9:30])
            assert "\n" not in str(error.value) and session.length == 9 and not ranks.pids
            session.prompt(TOKENS[:1, 9:30])
            assert set(first).isdisjoint(ranks.pids) and session.length == 30
        last = ranks.pids
    assert not ranks.pids and len(last) == 2
    for pid in last:  # they end with the model
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.long
def test_a_process_that_ended_between_prompts_is_replaced(artifact):
    with accel.load(artifact) as model, model.session() as session:
        session.prompt(TOKENS[:1, :20])
        (first, other), ranks = crew(session).pids, crew(session)
        os.kill(first, signal.SIGKILL)
        os.waitid(os.P_PID, first, os.WEXITED | os.WNOWAIT)
        logits = session.prompt(TOKENS[:1, 20:40])
        assert {first, other}.isdisjoint(ranks.pids)
        with built("llama", "onnx").session() as plain:
            plain.prompt(TOKENS[:1, :20])
            assert far(logits, plain.prompt(TOKENS[:1, 20:40])) < 1e-5


@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(("name", "options"), FORMS, ids=str)
def test_every_method_runs_as_processes(name, options, ranks):
    table = {**TABLE, "use": name, "ranks": ranks, **options}
    want, figures = prompted(
        built("llama", "eager", {"prefill.ranks": {**table, "processes": False}})
    )
    with accel.load(built("llama", "onnx", {"prefill.ranks": table}).artifact.path) as model:
        got, stats = prompted(model)
    assert far(got, want) < 1e-4
    assert stats["exchanged_bytes"] == figures["exchanged_bytes"]
