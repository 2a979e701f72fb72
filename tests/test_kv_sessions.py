"""Eviction through sessions: what is kept, what may be rewound, and what each row of a batch sees."""

import copy
from itertools import pairwise

import numpy as np
import pytest

from accel.ir.errors import InputError
from accel.runtime.session.state.eviction import EvictionState

from .kv_case import (
    FOREVER,
    LENGTHS,
    RECIPES,
    Case,
    conversation,
    encoded,
    evicted,
    evicting,
    kept,
    kept_part,
    ragged_is_alone,
    state,
)
from .session_ways import close, singles


@pytest.fixture
def case(stateful):
    """case(recipe) -> it on a small Llama of two layers, two KV heads."""
    return lambda name: evicted(stateful, name)


# What is kept


@pytest.mark.few(3)
@pytest.mark.parametrize("name", RECIPES)
def test_the_first_token_after_a_prompt_is_the_full_models(case, name):
    case, tokens = case(name), case(name).tokens(1, 40)
    plain, session = case.session(budget=FOREVER), case.session()
    assert np.array_equal(plain.run(tokens), session.run(tokens))
    session.end_prompt()
    plain.end_prompt()
    assert kept(session)[0].shape[2] and not kept(plain)[0].shape[2]
    assert not np.allclose(
        singles(plain, tokens[:, :3]), singles(session, tokens[:, :3]), atol=1e-4
    )


@pytest.mark.few(8)
@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("when", ["prompt", "chunk", "every"])
def test_a_budget_beyond_the_context_changes_no_bit(case, name, when):
    case = case(name)
    tokens = case.tokens(3, 88)
    plain = case.session(
        3, budget={"use": "uniform", "tokens_kept": 1 << 20}, when={"use": "prompt"}
    )
    wide = case.session(3, budget={"use": "uniform", "tokens_kept": 128}, when={"use": when})
    for a, b in zip(*(conversation(s, tokens, LENGTHS) for s in (plain, wide)), strict=True):
        assert np.array_equal(a, b)
    assert wide.stats == {**plain.stats, "seconds": wide.stats["seconds"]}


@pytest.mark.parametrize("cuts", [[31, 48], [31, 47, 48]])
def test_the_end_of_a_later_prompt_votes_however_it_is_cut(case, monkeypatch, cuts):
    """Its last token may run alone: the rest of a call that is one longer than a graph call, or a call of its own."""
    case, tokens = case("snapkv"), case("snapkv").tokens(1, 48)
    whole, cut = case.session(), case.session()
    for session in (whole, cut):
        session.run(tokens[:, :30])
        session.end_prompt()
        session.run(tokens[:, 30:31])
    whole.run(tokens[:, 31:])
    monkeypatch.setattr("accel.runtime.session.core.CHUNK", 16)
    for start, end in pairwise(cuts):
        cut.run(tokens[:, start:end])
    for session in (whole, cut):
        session.end_prompt()
    for layer, where in kept(whole).items():
        assert np.array_equal(kept(cut)[layer], where)


@pytest.mark.parametrize("longest", [1, 6])
def test_the_only_token_of_a_later_prompt_votes(case, longest):
    """Alone, and beside a row whose prompt has more."""
    case, tokens = case("snapkv"), case("snapkv").tokens(2, 42)
    session = case.session(2)
    session.prompt(tokens[:, :30])
    session.run(tokens[:, 30:31])
    session.prompt(tokens[:, 31 : 31 + longest], [1, longest])
    alone = case.session(1)
    alone.run(tokens[:1, :30])
    alone.end_prompt()
    alone.run(tokens[:1, 30:31])
    alone.observer(EvictionState)._guesses = True  # single tokens are observed
    alone.run(tokens[:1, 31:32])
    alone.end_prompt()
    for layer, where in kept(alone).items():
        assert np.array_equal(kept(session)[layer][:1], where)


def test_what_a_row_generates_does_not_vote_beside_one_that_is_empty(case):
    case, tokens = case("snapkv"), case("snapkv").tokens(2, 42)
    found = []
    for rows in (1, 2):
        session = case.session(rows)
        session.prompt(tokens[:rows, :30], [30, 0][:rows])
        for i in range(30, 36):
            session.run(tokens[:rows, [i]], [1, 0][:rows])
        session.prompt(tokens[:rows, 36:38], [2, 0][:rows])
        found.append(kept(session))
    for layer, where in found[0].items():
        assert np.array_equal(found[1][layer][:1], where)


@pytest.mark.parametrize("when", ["prompt", "chunk"])
def test_a_long_prompt_is_cut_alike_alone_and_beside_a_longer_one(case, monkeypatch, when):
    """None of its graph calls has a single token, which would count as a generated one."""
    case, lengths = case("h2o" if when == "prompt" else "snapkv"), [73, 90]
    monkeypatch.setattr("accel.runtime.session.core.CHUNK", 70)
    tokens, axes = case.tokens(2, 90), {"when": {"use": when}}
    session, seen = case.session(2, **axes), []
    step = session._core.step

    def spied(ids, positions, *rest, **more):
        seen.append((positions >= 0).sum(1).tolist())
        return step(ids, positions, *rest, **more)

    monkeypatch.setattr(session._core, "step", spied)
    session.prompt(tokens, lengths)
    assert seen == [[40, 57], [33, 33]]
    for row, n in enumerate(lengths):
        alone = case.session(1, **axes)
        alone.prompt(tokens[[row], :n])
        for layer, where in kept(alone).items():
            assert np.array_equal(kept(session)[layer][[row]], where)


@pytest.mark.parametrize("name", RECIPES)
def test_a_kept_slot_holds_the_key_of_its_position(case, name):
    case = case(name)
    tokens = case.tokens(3, 40)
    plain, session = case.session(3, budget=FOREVER), case.session(3)
    for s in (plain, session):
        s.run(tokens, LENGTHS)
        s.end_prompt()
    full, some = state(plain), {part: kept_part(session, part) for part in "kv"}
    for layer, where in kept(session).items():
        for row, n in enumerate(LENGTHS):
            for head, held in enumerate(where[row]):
                used = held[held >= 0]
                assert (np.diff(used) > 0).all() and (used < n).all()
                assert (held[used.size :] == -1).all()
                for part in ("k", "v"):
                    if part == "v" and name == "value-merge":
                        continue
                    want = full[f"kv.{layer}.{part}"][row, head, used]
                    assert np.array_equal(some[part][layer][row, head, : used.size], want)


@pytest.mark.parametrize("name", RECIPES)
def test_counts_and_bytes_follow_the_budget(case, name):
    case = case(name)
    session = case.session(3)
    session.run(case.tokens(3, 40), LENGTHS)
    session.end_prompt()
    budget = case.plan.budget
    total = session.batch * 0
    for i, (layer, where) in enumerate(kept(session).items()):
        counts = (where >= 0).sum(2)  # [B,G]
        want = [min(n, budget.tokens(n, i, len(case.plan.heads))) for n in LENGTHS]
        if name == "ada-kv":
            assert (counts.sum(1) == np.array(want) * 2).all()
        else:
            assert (counts == np.array(want)[:, None]).all()
        sizes = {
            s.name: s.shape
            for s in case.program.state
            if s.layer == layer and s.role.startswith("kept")
        }
        width = sum(s[3] for s in sizes.values() if len(s) == 4) * 4 + 8 + 4 * (name == "h2o")
        if name == "ada-kv":  # what heads keep, and how many
            total += where.shape[0] * (counts.sum(1).max() * width + 8 * where.shape[1])
        else:
            total += where.shape[0] * where.shape[1] * counts.max() * width
    assert session.stats["kv_bytes"] == total


def test_only_the_tokens_that_stay_are_seen(case):
    """The sinks and the newest of streaming-llm, against a full cache in which the rest is hidden."""
    streaming(case("streaming-llm"), 24)
    with pytest.raises(AssertionError):
        streaming(case("streaming-llm"), 24, hide=lambda held: held > 5)


def streaming(case: Case, length: int, hide=None, kept=12):
    tokens = case.tokens(1, length + 8)
    session, plain = (
        case.session(budget={"use": "uniform", "tokens_kept": kept}),
        case.session(budget=FOREVER),
    )
    for s in (session, plain):
        encoded(case, s)
        s.run(tokens[:, :length])
        s.end_prompt()
    held = plain._core.backend._state["kv.pos"]
    hide = hide or (lambda p: (p >= 2) & (p < length - (kept - 2)))
    plain._core.backend._state["kv.pos"] = held.masked_fill(hide(held), -1)
    close(
        singles(session, tokens[:, length : length + 4]),
        singles(plain, tokens[:, length : length + 4]),
    )
    close(session.run(tokens[:, -4:]), plain.run(tokens[:, -4:]))


# Rows


@pytest.mark.few(3)
@pytest.mark.parametrize("name", RECIPES)
def test_a_row_of_a_batch_is_that_row_alone(case, name):
    ragged_is_alone(case(name))


@pytest.mark.long
def test_empty_slots_between_tokens_do_not_part_them(stateful, monkeypatch):
    """Negative control: pooling over slots as they lie tells a batch from its rows."""
    from accel.passes.kv.score import _window, snapkv

    right = _window.pooled
    monkeypatch.setattr(snapkv, "pooled", lambda s, p, *rest: right(s, p.clamp(min=0), *rest))
    with pytest.raises(AssertionError):
        ragged_is_alone(evicting(stateful("llama"), RECIPES["snapkv"]))


@pytest.mark.parametrize("name", ["snapkv", "h2o"])
def test_forks_are_apart(case, name):
    forks_are_apart(case(name))


def forks_are_apart(case: Case):
    tokens, more = case.tokens(1, 30), case.tokens(1, 20, seed=1)
    session, control = case.session(), case.session()
    for s in (session, control):
        s.run(tokens)
        s.end_prompt()
        singles(s, tokens[:, :2])
        s.run(more[:, :3])
    other = session.fork()
    other.run(more)
    other.end_prompt()
    other.rewind(0)
    other.run(more)
    for s in (session, control):
        s.end_prompt()
    assert np.array_equal(singles(session, tokens[:, :4]), singles(control, tokens[:, :4]))
    assert session.stats["kv_bytes"] == control.stats["kv_bytes"]


def test_a_shared_memory_of_queries_is_caught(case, monkeypatch):
    """Negative control."""
    from accel.runtime.session.state.eviction import EvictionState

    right = EvictionState.observe

    def shared(self, queries, positions):
        old = self._queries
        right(self, queries, positions)
        old.update(self._queries)
        self._queries = old

    monkeypatch.setattr(EvictionState, "observe", shared)
    monkeypatch.setattr(EvictionState, "copy", copy.copy)
    with pytest.raises(AssertionError):
        forks_are_apart(case("snapkv"))


# Rewinding


def test_what_came_after_a_compression_may_be_forgotten(case):
    case = case("snapkv")
    tokens = case.tokens(1, 40)
    session = case.session()
    session.run(tokens)
    session.end_prompt()
    assert session.held_from == [40]
    want = singles(session, tokens[:, :3])
    session.rewind(40)
    singles(session, tokens[:, 20:26])
    session.rewind(41)
    session.rewind(40)
    close(singles(session, tokens[:, :3]), want)
    with pytest.raises(
        InputError,
        match=r"cannot rewind row 0 to 39: older tokens were evicted or merged; give 40\.\.43, or 0",
    ):
        session.rewind(39)
    assert session.length == 43


def test_a_new_text_in_an_old_session_is_as_in_a_new_one(case):
    for name in RECIPES:
        one = case(name)
        tokens = one.tokens(2, 88)
        old, new = one.session(2), one.session(2)
        conversation(old, tokens[::-1], [40, 9])
        old.rewind(0)
        for a, b in zip(*(conversation(s, tokens, [30, 12]) for s in (old, new)), strict=True):
            close(a, b)


def test_one_row_starts_anew_beside_another(case):
    for name in RECIPES:
        one = case(name)
        tokens = one.tokens(2, 40)
        session, control = one.session(2), one.session(2)
        for s, lengths in ((session, [40, 30]), (control, [40, 0])):
            s.run(tokens, lengths)
            s.end_prompt()
        session.rewind([40, 0])
        for s in (session, control):
            s.run(tokens, [0, 25])
            s.end_prompt()
        close(singles(session, tokens[:, :5]), singles(control, tokens[:, :5]))


def test_what_was_counted_is_not_taken_back(case):
    session = case("h2o").session()
    session.run(case("h2o").tokens(1, 20))
    with pytest.raises(
        InputError, match=r"rewind row 0 to 19: the recipe accumulates .* give 20\.\.20, or 0"
    ):
        session.rewind(19)
    session.rewind(20)
    session.rewind(0)
    assert not state(session)["mass.0.recent"].any()
