"""When a session compresses, and what becomes of a call that fails."""

import numpy as np
import pytest

from accel.compiler.assemble import assemble
from accel.ir.errors import AccelError, InputError, RecipeError
from accel.ir.recipe import Recipe
from accel.runtime.session import core as session_module
from accel.runtime.session.state.eviction import EvictionState

from .kv_case import RECIPES, evicted, evicting, held, kept, ragged_is_alone, recipe
from .session_ways import close, singles


@pytest.fixture
def case(stateful):
    return lambda name: evicted(stateful, name)


# Moments


def test_the_held_tokens_stay_bounded(case, monkeypatch):
    monkeypatch.setattr(session_module, "CHUNK", 16)
    one = case("streaming-llm")
    tokens = one.tokens(2, 100)
    for when, most in (({"use": "every", "tokens": 5}, 12 + 5 - 1), ({"use": "chunk"}, 12)):
        session = one.session(2, when=when)
        widest = []
        step = session._core.step
        session._core.step = lambda *a, s=session, w=widest, f=step, **k: (
            w.append(held(s)),
            f(*a, **k),
        )[1]
        session.run(tokens, [100, 47])
        session.end_prompt()
        assert max(widest) <= most + (0 if when["use"] == "chunk" else 16) and len(widest) == 7
        assert held(session) <= most
        if when["use"] == "every":
            for i in range(20):
                session.run(tokens[:, [i]])
                assert held(session) <= most
    plain = one.session(2, when={"use": "prompt"})
    plain.run(tokens)
    assert held(plain) == 100, "which the law catches"


def test_a_budget_is_asked_again_only_when_there_may_be_something_to_drop(case, monkeypatch):
    one = case("streaming-llm")
    session, asked = one.session(2, when={"use": "every", "tokens": 5}), []
    tokens = one.tokens(2, 40)
    session.run(tokens[:, :6])
    kind = type(session.observer(EvictionState))
    whole = kind._tokens
    monkeypatch.setattr(
        kind, "_tokens", lambda eviction, lengths: asked.append(lengths) or whole(eviction, lengths)
    )
    for i in range(6, 12):
        session.run(tokens[:, [i]])
    assert not asked and held(session) == 12, "all of which the budget keeps"
    for i in range(12, 17):
        session.run(tokens[:, [i]])
    assert asked and held(session) <= 12 + 4
    assert session.held_from.max() > 0


@pytest.mark.few(1)
@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("when", [{"use": "every", "tokens": 3}, {"use": "chunk"}])
def test_rows_are_alone_at_every_moment(case, monkeypatch, name, when):
    """What is due for the longest row is due for all, which changes none but those that are due."""
    monkeypatch.setattr(session_module, "CHUNK", 16)
    one = case(name)
    ragged_is_alone(one.other(when=when), [40, 40, 40])


@pytest.mark.long
def test_a_prompt_given_one_by_one_shows_its_queries(case):
    one = case("snapkv")
    tokens = one.tokens(1, 40)
    single, whole = one.session(), one.session()
    single.end_prompt()  # of nothing
    singles(single, tokens)
    whole.run(tokens)
    for s in (single, whole):
        s.end_prompt()
    assert all(
        np.array_equal(a, b)
        for a, b in zip(kept(single).values(), kept(whole).values(), strict=True)
    )
    eviction = single.observer(EvictionState)
    for width, observed in ((1, False), (2, True)):
        single.run(tokens[:, :width])
        assert bool(eviction.before(single._core.backend, width)) == observed


@pytest.mark.few(2)
@pytest.mark.parametrize("name", RECIPES)
def test_prompts_of_one_token_and_of_none(case, name):
    """Beside a long one, and alone; with room for a single token."""
    one = case(name)
    tokens = one.tokens(3, 60)
    ragged_is_alone(one, [40, 1, 1])
    session = one.session(3, budget={"use": "uniform", "tokens_kept": 1})
    session.run(tokens[:, :30], [30, 1, 0])
    session.end_prompt()
    assert [int((w >= 0).sum(2).max()) for w in kept(session).values()] == [1, 1]
    assert np.isfinite(session.run(tokens[:, 30:33], [3, 0, 2])).all()
    session.end_prompt()
    session.rewind(0)
    session.end_prompt()
    alone, fresh = one.session(1), one.session(1)
    for s in (alone, fresh):
        s.run(tokens[:1, :1])
    alone.end_prompt()
    assert np.array_equal(singles(alone, tokens[:1, 1:4]), singles(fresh, tokens[:1, 1:4]))


@pytest.mark.long
def test_a_window_beyond_the_context_takes_no_memory(stateful):
    """And protects every token: the newest stay."""
    tables = recipe("snapkv") | {"kv.score": {"use": "snapkv", "window": 1024}}
    one = evicting(stateful("llama"), tables)
    session = one.session(2)
    session.run(one.tokens(2, 40), [40, 9])
    session.end_prompt()
    for where in kept(session).values():
        assert (where[0] == np.arange(28, 40)).all() and (where[1, :, :9] == np.arange(9)).all()


def test_how_without_which_is_refused():
    for axis, name in (("kv.budget", "uniform"), ("kv.when", "every"), ("kv.keep", "value-merge")):
        with pytest.raises(
            RecipeError, match=f"{axis} sets how tokens are evicted, but no kv.score selects them"
        ):
            assemble(Recipe(tables={axis: {"use": name}}))


@pytest.mark.parametrize(
    "table, says",
    [
        ({"use": "snapkv", "window": 0}, "window is 0"),
        ({"use": "snapkv", "kernel": 4}, "kernel is 4; give an odd number, 1 to 63"),
        ({"use": "snapkv", "pooling": "sum"}, "pooling 'sum' does not exist; known: max, mean"),
        ({"use": "h2o", "recent": -1}, "recent is -1; give at least 0"),
        ({"use": "streaming-llm", "sinks": -4}, "sinks is -4; give at least 0"),
        ({"use": "snapkw"}, "did you mean 'snapkv'"),
        ({"use": "knorm", "window": 3}, "window"),
    ],
)
def test_options_that_cannot_be_are_refused(table, says):
    with pytest.raises(RecipeError, match=f"recipe 'recipe': .*{says}"):
        assemble(Recipe(tables={"kv.score": table}))


# Failures


class Fails:
    """A backend session whose `name` fails at its nth call."""

    def __init__(self, inner, name, at):
        self.inner, self.name, self.at = inner, name, at

    def __getattr__(self, name):
        found = getattr(self.inner, name)
        if name != self.name:
            return found
        self.at -= 1
        if self.at == 0:
            raise MemoryError("no room")
        return found


@pytest.mark.parametrize("name", ["snapkv", "value-merge"])
@pytest.mark.parametrize("what, at", [("compress", 1), ("step", 2), ("resize", 1)])
def test_a_call_that_fails_is_as_if_it_had_not_been(case, monkeypatch, name, what, at):
    monkeypatch.setattr(session_module, "CHUNK", 16)
    one = case(name)
    tokens = one.tokens(1, 40)
    session = one.session(wrap=lambda s: Fails(s, what, at))
    with pytest.raises(MemoryError):
        session.run(tokens)
        session.end_prompt()
    if what != "compress":
        assert session.length == 0
        session.run(tokens)
    session.end_prompt()
    control = one.session()
    control.run(tokens)
    control.end_prompt()
    close(singles(session, tokens[:, :4]), singles(control, tokens[:, :4]))


@pytest.mark.parametrize("name, when", [("snapkv", "chunk"), ("h2o", "prompt")])
def test_a_call_that_cannot_be_taken_back_closes_the_session(case, monkeypatch, name, when):
    monkeypatch.setattr(session_module, "CHUNK", 16)
    one = case(name)
    session = one.session(wrap=lambda s: Fails(s, "step", 3), when={"use": when})
    with pytest.raises(AccelError, match="MemoryError: no room.*closed, open another"):
        session.run(one.tokens(1, 40))
    with pytest.raises(InputError, match="closed"):
        session.run(one.tokens(1, 1))
