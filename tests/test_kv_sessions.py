"""Eviction through sessions: what is kept, what may be rewound, and what each row of a batch sees."""

import numpy as np
import pytest

from accel.ir.errors import AccelError, InputError
from accel.runtime import session as session_module

from .kv_case import FOREVER, Case, evicting, kept, recipe, state

SCORES = ["snapkv", "knorm", "h2o", "streaming-llm"]
RECIPES = {
    **{score: recipe(score) for score in SCORES},
    "ada-kv": recipe(budget="ada-kv"),
    "pyramidkv": recipe(budget="pyramidkv"),
    "value-merge": recipe(keep="value-merge"),
}
LENGTHS = [40, 23, 9]


@pytest.fixture(scope="module")
def case(stateful):
    """case(recipe) -> it on a small Llama of two layers, two KV heads."""
    made = {}

    def get(name: str) -> Case:
        if name not in made:
            made[name] = evicting(stateful("llama"), RECIPES[name])
        return made[name]

    return get


def close(a, b):
    np.testing.assert_allclose(a, b, atol=2e-4, rtol=1e-4)


def decoded(session, tokens):
    """Logits of single tokens [B,T]."""
    return np.concatenate([session.run(tokens[:, [i]]) for i in range(tokens.shape[1])], axis=1)


def conversation(session, tokens, lengths, longest=40, rounds=2):
    """Prompts of the rows' lengths, each followed by four single tokens: all logits that are real.

    No row gets a token twice: keys of one length would tie.
    """
    out = []
    for turn in range(rounds):
        given = tokens[:, turn * (longest + 4) :]
        logits = session.run(given[:, : max(lengths)], lengths)
        out += [row[:n] for row, n in zip(logits, lengths, strict=True)]
        session.end_prompt()
        out += list(decoded(session, given[:, longest : longest + 4]))
    return out


# What is kept


@pytest.mark.parametrize("name", RECIPES)
def test_the_first_token_after_a_prompt_is_the_full_models(case, name):
    case, tokens = case(name), case(name).tokens(1, 40)
    plain, session = case.session(budget=FOREVER), case.session()
    assert np.array_equal(plain.run(tokens), session.run(tokens))
    session.end_prompt()
    plain.end_prompt()
    assert kept(session)[0].shape[2] and not kept(plain)[0].shape[2]
    assert not np.allclose(
        decoded(plain, tokens[:, :3]), decoded(session, tokens[:, :3]), atol=1e-4
    )


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


@pytest.mark.parametrize("name", RECIPES)
def test_a_kept_slot_holds_the_key_of_its_position(case, name):
    case = case(name)
    tokens = case.tokens(3, 40)
    plain, session = case.session(3, budget=FOREVER), case.session(3)
    for s in (plain, session):
        s.run(tokens, LENGTHS)
        s.end_prompt()
    full, some = state(plain), state(session)
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
                    assert np.array_equal(
                        some[f"kept.{layer}.{part}"][row, head, : used.size], want
                    )


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
    held = plain._stepper._state["kv.pos"]
    hide = hide or (lambda p: (p >= 2) & (p < length - (kept - 2)))
    plain._stepper._state["kv.pos"] = held.masked_fill(hide(held), -1)
    close(
        decoded(session, tokens[:, length : length + 4]),
        decoded(plain, tokens[:, length : length + 4]),
    )
    close(session.run(tokens[:, -4:]), plain.run(tokens[:, -4:]))


def encoded(case: Case, session):
    encoder = case.program.facts.encoder
    if encoder is not None:
        session.encode(np.random.default_rng(1).integers(3, encoder.vocab_size, (session.batch, 7)))


# Rows


@pytest.mark.parametrize("name", RECIPES)
def test_a_row_of_a_batch_is_that_row_alone(case, name):
    ragged_is_alone(case(name))


def ragged_is_alone(case: Case, lengths=LENGTHS):
    tokens = case.tokens(3, 88)
    together = case.session(3)
    encoded(case, together)
    all_rows = conversation(together, tokens, lengths)
    for row, n in enumerate(lengths):
        alone = case.session(1)
        if case.program.facts.encoder is not None:
            encoder = case.program.facts.encoder
            given = np.random.default_rng(1).integers(3, encoder.vocab_size, (3, 7))
            alone.encode(given[[row]])
        cut = conversation(alone, tokens[[row]], [n])
        for i, want in enumerate(cut):
            close(all_rows[3 * i + row], want)
        for layer, where in kept(alone).items():
            got = kept(together)[layer][row]
            width = where.shape[2]
            assert np.array_equal(got[:, :width], where[0]) and (got[:, width:] == -1).all()


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
        decoded(s, tokens[:, :2])
        s.run(more[:, :3])
    other = session.fork()
    other.run(more)
    other.end_prompt()
    other.rewind(0)
    other.run(more)
    for s in (session, control):
        s.end_prompt()
    assert np.array_equal(decoded(session, tokens[:, :4]), decoded(control, tokens[:, :4]))
    assert session.stats["kv_bytes"] == control.stats["kv_bytes"]


def test_a_shared_memory_of_queries_is_caught(case, monkeypatch):
    """Negative control."""
    from accel.runtime.keeper import Keeper

    right = Keeper.observe

    def shared(self, queries, positions):
        old = self._queries
        right(self, queries, positions)
        old.update(self._queries)
        self._queries = old

    monkeypatch.setattr(Keeper, "observe", shared)
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
    want = decoded(session, tokens[:, :3])
    session.rewind(40)
    decoded(session, tokens[:, 20:26])
    session.rewind(41)
    session.rewind(40)
    close(decoded(session, tokens[:, :3]), want)
    with pytest.raises(
        InputError,
        match=r"cannot rewind row 0 to 39: older tokens were compressed; give 40\.\.43, or 0",
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
        close(decoded(session, tokens[:, :5]), decoded(control, tokens[:, :5]))


def test_what_was_counted_is_not_taken_back(case):
    session = case("h2o").session()
    session.run(case("h2o").tokens(1, 20))
    with pytest.raises(
        InputError, match=r"rewind row 0 to 19: the recipe counts .* give 20\.\.20, or 0"
    ):
        session.rewind(19)
    session.rewind(20)
    session.rewind(0)
    assert not state(session)["mass.0.recent"].any()


# Moments


def test_the_held_tokens_stay_bounded(case, monkeypatch):
    monkeypatch.setattr(session_module, "CHUNK", 16)
    one = case("streaming-llm")
    tokens = one.tokens(2, 100)
    for when, most in (({"use": "every", "tokens": 5}, 12 + 5 - 1), ({"use": "chunk"}, 12)):
        session = one.session(2, when=when)
        widest = []
        step = session._step
        session._step = lambda *a, s=session, w=widest, f=step: (w.append(held(s)), f(*a))[1]
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


def held(session) -> int:
    """Tokens that a row holds at most."""
    slots = [int((p >= 0).sum(2).max()) for p in kept(session).values()]
    return max(slots, default=0) + int((session.lengths - session.held_from).max())


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("when", [{"use": "every", "tokens": 3}, {"use": "chunk"}])
def test_rows_are_alone_at_every_moment(case, monkeypatch, name, when):
    """What is due for the longest row is due for all, which changes none but those that are due."""
    monkeypatch.setattr(session_module, "CHUNK", 16)
    one = case(name)
    ragged_is_alone(Case(one.program, one.other(when=when)), [40, 40, 40])


def test_a_prompt_given_one_by_one_shows_its_queries(case):
    one = case("snapkv")
    tokens = one.tokens(1, 40)
    single, whole = one.session(), one.session()
    decoded(single, tokens)
    whole.run(tokens)
    for s in (single, whole):
        s.end_prompt()
    assert all(
        np.array_equal(a, b)
        for a, b in zip(kept(single).values(), kept(whole).values(), strict=True)
    )
    single.run(tokens[:, :1])
    assert not single._keeper.observes(1) and single._keeper.observes(2)


# Failures


class Fails:
    """A stepper whose `name` fails at its nth call."""

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
    close(decoded(session, tokens[:, :4]), decoded(control, tokens[:, :4]))


@pytest.mark.parametrize("name, when", [("snapkv", "chunk"), ("h2o", "prompt")])
def test_a_call_that_cannot_be_taken_back_closes_the_session(case, monkeypatch, name, when):
    monkeypatch.setattr(session_module, "CHUNK", 16)
    one = case(name)
    session = one.session(wrap=lambda s: Fails(s, "step", 3), when={"use": when})
    with pytest.raises(AccelError, match="MemoryError: no room.*closed, open another"):
        session.run(one.tokens(1, 40))
    with pytest.raises(InputError, match="closed"):
        session.run(one.tokens(1, 1))
