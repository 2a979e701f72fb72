"""Traces that tests share leave programs as they are, and none is of what a test replaces."""

from dataclasses import replace

import models
import pytest
import torch

from accel.compiler.over_state import over_state
from accel.ir.capture.capture import capture
from accel.passes.kv.score.knorm import KNorm
from accel.runtime.kv.budget.uniform import Uniform
from accel.runtime.session.session import Session

from . import traces
from .kv_case import evicting, recipe
from .session_ways import singles


def evicts(layers, own=False):
    """A program of so many layers that evicts."""
    program = over_state(capture(models.make("llama", layers), max_context=48))
    return evicting(replace(program, traces={}) if own else program, recipe("knorm"))


def logits(case):
    tokens = case.tokens(1, 40)
    session = case.session()
    session.run(tokens[:, :36])
    session.end_prompt()
    return singles(session, tokens[:, 36:])


@pytest.mark.long
def test_a_program_is_the_same_over_traces_of_another():
    evicts(3)
    before = len(traces._made)
    got, want = evicts(2), evicts(2, own=True)
    assert before == len(traces._made) > 0, "it was traced once more"
    assert got.program.text() == want.program.text() and (logits(got) == logits(want)).all()
    (mode,) = {
        n.meta["val"].fake_mode
        for entry in got.program.entries.values()
        for n in entry.graph.nodes
        if hasattr(n.meta.get("val"), "fake_mode")
    }
    assert mode is not None, "values of one program"


@pytest.mark.long
def test_what_a_test_replaces_is_traced_for_itself(monkeypatch):
    plain = evicts(2).program.text()
    before = len(traces._made)
    with monkeypatch.context() as patch:
        patch.setattr(KNorm, "__call__", lambda self, keys: keys.float().sum(-1))
        other = evicts(2).program.text()
    assert "vector_norm" in plain and "vector_norm" not in other
    assert len(traces._made) == before and evicts(2).program.text() == plain


@pytest.mark.parametrize(
    "change", ["", "environment", "attribute", "item", "method", "session", "module"]
)
def test_what_is_replaced_is_seen(monkeypatch, change):
    """But what only runs programs, which no pass asks."""
    if change == "environment":
        monkeypatch.setenv("A_NAME", "1")
    elif change == "attribute":
        monkeypatch.setattr(torch, "relu", None)
    elif change == "item":
        monkeypatch.setitem({}, "a", 1)
    elif change == "method":
        monkeypatch.setattr(Uniform, "shares", None, raising=False)  # a pass may hold it
    elif change == "session":
        monkeypatch.setattr(Session, "run", None)
    elif change == "module":
        monkeypatch.setattr("accel.runtime.session.core.CHUNK", 4)
    assert traces.patched() == (change in ("attribute", "item", "method"))
    monkeypatch.undo()
    assert not traces.patched()
