"""Laws of moments: what is asked for comes, and what is held stays bounded."""

import numpy as np
import pytest

from accel.ir.errors import RecipeError
from accel.ir.kv import KvFacts
from accel.runtime.kv.when import MOMENTS, Base
from accel.runtime.session.state._kv_plan import KvPlan
from accel.runtime.session.state.eviction import EvictionState

from ..kv_slots import AXES, build

NAMES = AXES["when"].names()


def law_answers(when):
    """A moment is due or not; more tokens since the last time never make it less so; a prompt's end, or
    so many tokens, is due at last."""
    for moment in MOMENTS:
        due = [when.due(moment, n) for n in range(1, 400)]
        assert all(isinstance(d, bool) for d in due) and due == sorted(due)
    assert any(when.due(moment, 1 << 30) for moment in MOMENTS)
    assert when.single == any(when.due(m, 1 << 40) for m in ("call", "token"))


@pytest.mark.parametrize("name", NAMES)
def test_law(name):
    law_answers(build("when", name))


def test_the_law_catches():
    class Never(Base):
        def due(self, moment, recent):
            return False

    class Odd(Base):
        def due(self, moment, recent):
            return recent % 2 == 1

    for broken in (Never(), Odd()):
        with pytest.raises(AssertionError):
            law_answers(broken)


def test_every_is_due_at_its_number_of_tokens():
    every = build("when", "every", tokens=5)
    assert [every.due("call", n) for n in (4, 5)] == [False, True]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("budget", AXES["budget"].names())
def test_a_keeper_holds_no_more_than_it_says(name, budget):
    """Numbers alone: a long conversation of two rows, in parts of 32."""
    size = {} if AXES["budget"].method(budget).adaptive else {"tokens_kept": 20}
    plan = KvPlan(build("budget", budget, **size), build("when", name), KvFacts(), {0: 2, 3: 2})
    eviction, lengths = EvictionState(plan, 2), np.zeros(2, np.int64)
    for new in (100, 1, 1, 40, *[1] * 60):
        for part in range(0, new, 32):
            held = lengths + min(part, new)
            if part:
                step(eviction, "part", held)
        lengths = lengths + [new, max(1, new // 3)]
        step(eviction, "call", lengths)
        if new > 1:
            step(eviction, "prompt", lengths)
            if plan.when.due("prompt", 1 << 40):
                assert (eviction.base == lengths).all(), "a prompt's end looks at all of it"
        held = lengths - eviction.base
        held = held + eviction._kept.max(axis=0) if plan.when.whole else held
        if not plan.when.due("prompt", 1 << 40):
            assert held.max() < plan.when.tokens or not eviction.due("call", lengths)


def step(eviction, moment, lengths):
    if eviction.due(moment, lengths):
        eviction.compressed(lengths)
        assert not eviction.due(moment, lengths), "what is left is within the budget"


def test_a_row_that_starts_anew_owes_nothing():
    plan = KvPlan(
        build("budget", "uniform", tokens_kept=4), build("when", "prompt"), KvFacts(), {0: 2}
    )
    eviction = EvictionState(plan, 2)
    step(eviction, "prompt", np.array([9, 3]))
    eviction.forget(np.array([True, False]))
    assert eviction.base.tolist() == [0, 3]
    assert not eviction.due("prompt", np.array([4, 4])) and eviction.due("prompt", np.array([5, 4]))


@pytest.mark.parametrize("name", ["every", "full"])
@pytest.mark.parametrize("tokens", [0, -1])
def test_every_no_tokens_is_refused(name, tokens):
    with pytest.raises(RecipeError, match=f"kv.when.{name}: tokens is {tokens}; give at least 1"):
        AXES["when"].build(name, tokens=tokens)


def test_full_counts_what_was_kept():
    """Not due before there are 30; then of 12 that stay, 18 tokens later."""
    plan = KvPlan(
        build("budget", "uniform", tokens_kept=12),
        build("when", "full", tokens=30),
        KvFacts(),
        {0: 2},
    )
    eviction, due = EvictionState(plan, 1), []
    for length in range(1, 70):
        due += [length] * eviction.due("token", np.array([length]))
        step(eviction, "token", np.array([length]))
    assert due == [30, 48, 66]
