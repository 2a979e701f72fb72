"""A draft model over the toy: what it drafts, that its session follows, and the target's own tokens and odds."""

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from accel.ir.errors import InputError
from accel.runtime.artifact.artifact import open_artifact
from accel.runtime.backends.onnx.backend import OrtBackend
from accel.runtime.decode.costs import Costs
from accel.runtime.decode.sampling_params import SamplingParams
from accel.runtime.draft import _by_logits
from accel.runtime.draft.model import Model
from accel.runtime.model.compiled import CompiledModel
from accel.runtime.sample.standard import Standard
from accel.runtime.session.observers.observer import Capabilities
from accel.runtime.session.session import Session
from accel.runtime.speculation.follow import Follower
from accel.runtime.speculation.guard import FIRST
from accel.runtime.verify import Chance

from ..draft_case import plain, rows_of, speculated, surprise

COSTS = Costs((1, 32), (1.0, 1.0))


class Biased:
    """A backend session whose logits lean: a draft model that agrees at times."""

    def __init__(self, inner: Any, strength: float):
        self.inner, self.strength = inner, strength
        self.bias = np.random.default_rng(3).standard_normal((1, 1, 999)).astype(np.float32)

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def step(self, *args):
        out = self.inner.step(*args)
        bias = self.strength * self.bias[..., : out.logits.shape[-1]]
        return replace(out, logits=out.logits + bias)


@dataclass
class Beside:
    """A model whose sessions are the toy's, and the target that has it beside."""

    toy: Any
    strength: float = 0.0
    vocabulary: int = 320
    context: int = 1300
    costs: Costs = COSTS
    tokenizer: Any = None
    opened: Any = None

    def session(self, batch=1):
        backend = Biased(self.toy.engines["ort"].open_session(batch), self.strength)
        if self.vocabulary != self.toy.vocab:
            inner, size = backend.step, self.vocabulary

            def step(*args):
                out = inner(*args)
                wide = np.pad(out.logits, ((0, 0), (0, 0), (0, max(0, size - 320))))
                return replace(out, logits=wide[..., :size])

            backend.step = step
        self.opened = Session(backend, batch, vocab_size=self.vocabulary, max_context=self.context)
        return self.opened

    @property
    def target(self):
        facts = SimpleNamespace(vocab_size=320)
        return SimpleNamespace(draft_model=self, tokenizer=self.tokenizer, facts=facts, costs=COSTS)

    @property
    def facts(self):
        return SimpleNamespace(
            vocab_size=self.vocabulary, max_context=self.context, max_batch=self.toy.batch
        )


@pytest.fixture
def groups(toy):
    rng = np.random.default_rng(5)
    return [[rng.integers(0, toy.vocab, n).tolist() for n in (5, 1, 30)] for _ in range(4)]


def decoded(toy, group, beside, sampler=None, rule="spec-chain", **options):
    """(rows, the target's calls) of a session that drafts with a model."""
    with toy.session(batch=len(group)) as session:
        rows = rows_of(group, *([sampler] if sampler else []))
        list(speculated(session, rows, Model(), rule, model=beside.target, **options))
        return rows, session.stats["calls"]


@pytest.mark.parametrize("strength", [0.0, 0.5, 2.0, 50.0])
def test_greedy_tokens_are_those_of_plain_decoding(toy, groups, strength):
    stood = []
    for group in groups:
        want = plain(toy.session(batch=3), rows_of(group))
        rows, _ = decoded(toy, group, Beside(toy, strength), tokens=4)
        assert [row.tokens for row in rows] == want
        stood += [row.drafting["accepted"] / row.drafting["drafted"] for row in rows]
    if strength == 0:
        assert set(stood) == {1.0}, "its own draft stands"
    elif strength == 50:
        assert max(stood) < 0.1
    else:
        assert len(set(stood)) > 3 and 0 < min(stood) < 1, "rows accept different numbers"


def test_it_saves_calls_and_catches_up_in_one(toy, groups):
    """24 tokens by 4 drafted and one more: a prompt, and 5 checks. The draft model: catching up, and 3 more each."""
    beside = Beside(toy)
    _, calls = decoded(toy, groups[0], beside, tokens=4)
    assert calls == 1 + 5 and beside.opened.stats["calls"] == 4 * 4 + 2, (
        "the last draft has two tokens"
    )
    with pytest.raises(InputError, match="closed"):
        beside.opened.run([[1]])


def test_samples_of_a_prompt_may_be_more_than_a_batch(toy):
    """As without drafts: a prompt of the target's session is repeated, however many rows that are."""
    artifact = open_artifact(toy.path)
    tables = {
        "loop": {"use": "speculative"},
        "draft": {"use": "model"},
        "verify": {"use": "sample-match"},
    }

    def made(**more):
        return CompiledModel(OrtBackend(artifact), artifact.facts, artifact=artifact, **more)

    with made(recipe={"tables": tables}, draft_model=made()) as model, made() as plainly:
        asked = SamplingParams(6, temperature=1.0, seed=2, n=toy.batch + 1)
        want = plainly.generate([5, 17, 200], sampling_params=asked)
        assert model.generate([5, 17, 200], sampling_params=asked).tokens == want.tokens


def test_rows_that_sleep_are_caught_up_in_one_call(toy):
    follower = Follower(Beside(toy), 2)
    seen = toy.tokens(2, 40)
    session = follower._session
    follower.follow({0: seen[0, :9], 1: seen[1, :4]})
    follower.run({0: seen[0, 9:10]})
    follower.run({0: np.array([7])})  # falls
    calls = session.stats["calls"]
    got = follower.follow({0: seen[0, :12], 1: seen[1, :33]})
    assert session.stats["calls"] == calls + 1 and session.lengths.tolist() == [12, 33]
    for i, size in enumerate((12, 33)):
        np.testing.assert_allclose(got[i, -1], toy.oracle(seen[i, :size])[-1], atol=1e-3, rtol=1e-3)
    follower.close()


def test_a_round_whose_check_failed_may_come_again(toy):
    """Of no row anything is new then; the last token runs again."""
    follower, seen = Follower(Beside(toy), 2), toy.tokens(2, 40)
    texts = {0: seen[0, :9], 1: seen[1, :4]}
    want = follower.follow(texts)
    follower.run({0: np.array([7])})
    np.testing.assert_allclose(follower.follow(texts), want, atol=1e-3, rtol=1e-3)
    assert follower._session.lengths.tolist() == [9, 4]
    follower.close()


def test_looking_back_says_what_the_model_would_have_said(toy):
    """Of rows of different lengths, one read from near its prompt's end on, in the first look and in a later one."""
    follower, seen = Follower(Beside(toy), 2), toy.tokens(2, 150)
    session = follower._session
    follower.ending(0, 105)
    follower.ending(1, 25)
    for sizes, first in (((120, 30), (105, 25)), ((125, 41), (120, 30)), ((149, 42), (133, 41))):
        calls = session.stats["calls"]
        found = follower.probe({i: seen[i, :n] for i, n in enumerate(sizes)}, {0: 105, 1: 25})
        assert session.stats["calls"] == calls + 1 and session.lengths.tolist() == [
            sizes[0] - 1 - 89,
            sizes[1] - 1,
        ]
        for i, start in enumerate((89, 0)):
            assert found[i][0] == first[i] and len(found[i][1]) == sizes[i] - first[i]
            want = toy.oracle(seen[i, start : sizes[i] - 1])[first[i] - 1 - start :]
            np.testing.assert_allclose(found[i][1], want, atol=1e-3, rtol=1e-3)
    got = follower.follow({0: seen[0, :150]})
    np.testing.assert_allclose(got[0, -1], toy.oracle(seen[0, 89:150])[-1], atol=1e-3, rtol=1e-3)
    follower.whole(0)
    got = follower.follow({0: seen[0, :150]})
    assert session.lengths.tolist() == [150, 41]
    np.testing.assert_allclose(got[0, -1], toy.oracle(seen[0, :150])[-1], atol=1e-3, rtol=1e-3)
    follower.close()


def test_a_long_look_leaves_out_logits_that_nobody_asked_for(toy):
    follower, seen, ends = Follower(Beside(toy), 1), toy.tokens(1, 100), []
    end = follower._session._core.end_prompt
    follower._session._core.end_prompt = lambda: ends.append(end())
    first, logits = follower.probe({0: seen[0]}, {0: 20})[0]
    assert len(ends) == 1, "what came since is no part of the prompt"
    assert first == 84 and logits.shape == (16, 320) and follower._session.stats["calls"] == 2
    np.testing.assert_allclose(logits, toy.oracle(seen[0, :99])[83:], atol=1e-3, rtol=1e-3)
    follower.close()


@pytest.mark.parametrize("penalty", [1.0, 1.01], ids=["plain", "penalised"])
def test_who_looks_back_first_gives_the_same_tokens(toy, groups, penalty):
    """And drafts where that pays: a draft model that says what the target does, and costs little."""
    drafted, sampler = {}, Standard(repetition_penalty=penalty)
    for strength in (0.0, 50.0):
        target = Beside(toy, strength, costs=Costs((1, 32), (1e-4, 1e-4))).target
        want = plain(toy.session(batch=3), rows_of(groups[0], sampler, limit=60))
        with toy.session(batch=3) as session:
            rows = rows_of(groups[0], sampler, limit=60)
            list(speculated(session, rows, Model(), "spec-chain", model=target, costs=COSTS))
        assert [row.tokens for row in rows] == want
        assert all(row.drafting["fallback"] >= FIRST for row in rows)
        drafted[strength] = sum(row.drafting["accepted"] for row in rows)
    assert drafted[0.0] > 60 and drafted[50.0] < 10


@pytest.mark.parametrize("costs", [None, COSTS], ids=["drafts", "looks back"])
@pytest.mark.parametrize("sampler", [Standard(), Standard(repetition_penalty=1.01)], ids=str)
def test_a_model_that_says_no_numbers_drafts_nothing(toy, groups, costs, sampler):
    target = Beside(toy, np.nan, costs=Costs((1, 32), (1e-4, 1e-4))).target
    want = plain(toy.session(batch=3), rows_of(groups[0], sampler, limit=40))
    with toy.session(batch=3) as session:
        rows = rows_of(groups[0], sampler, limit=40)
        list(speculated(session, rows, Model(), "spec-chain", model=target, costs=costs))
    assert [row.tokens for row in rows] == want
    assert not any(row.drafting["drafted"] for row in rows)


@pytest.mark.parametrize(("size", "drafted"), [(100, 8), (42, 0), (36, 4), (30, 8)])
def test_a_text_may_be_longer_than_the_draft_model_reads(toy, size, drafted):
    """It goes by the end of a long prompt, and drafts until what came since fills its context; of 36 and 42 tokens it
    reads all where the first draft begins, and there is little room behind them.
    """
    beside = Beside(toy, context=60, costs=Costs((1, 32), (1e-4, 1e-4)))
    prompts = [toy.tokens(1, size)[0].tolist()]
    want = plain(toy.session(batch=1), rows_of(prompts, limit=90))
    with toy.session(batch=1) as session:
        rows = rows_of(prompts, limit=90)
        list(speculated(session, rows, Model(), model=beside.target, costs=COSTS))
    assert rows[0].tokens == want[0]
    assert rows[0].drafting["drafted"] > drafted


@pytest.mark.few(1)
@pytest.mark.parametrize("rule", ["spec-chain", "block-verify"])
def test_sampled_tokens_have_the_odds_of_the_target(toy, rule):
    assert surprise(toy, rule, lambda law: Model(), 300, model=Beside(toy, 1.0).target) < 4


def test_a_draft_of_the_likeliest_that_says_it_was_drawn_is_caught(toy, monkeypatch):
    class Lies(Chance):
        def draw(self, law):
            return int(law.tokens[law.weights.argmax()])

    monkeypatch.setattr(_by_logits, "Chance", Lies)
    assert surprise(toy, "spec-chain", lambda law: Model(), 300, model=Beside(toy, 1.0).target) > 8


def test_sample_match_draws_what_plain_sampling_draws(toy, groups):
    sampler = Standard(temperature=0.8, top_p=0.9, repetition_penalty=1.2)
    for group in groups:
        want = plain(toy.session(batch=3), rows_of(group, sampler))
        rows, _ = decoded(toy, group, Beside(toy), sampler, "sample-match")
        assert [row.tokens for row in rows] == want
        assert sum(row.drafting["accepted"] for row in rows) > 0


@pytest.mark.parametrize("vocabulary", [300, 400])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_padded_vocabulary_is_no_hindrance(toy, groups, vocabulary, temperature):
    """Ids that one of the two lacks are never drafted, and take no draft from the target either."""
    sampler = Standard(temperature=temperature)
    rows, _ = decoded(toy, groups[1], Beside(toy, 0.0, vocabulary), sampler)
    if not temperature:
        assert [row.tokens for row in rows] == plain(toy.session(batch=3), rows_of(groups[1]))
    assert sum(row.drafting["accepted"] for row in rows) > 30


def test_a_short_context_of_the_draft_model_ends_its_drafts(toy, groups):
    group = [groups[0][0], groups[0][2]]  # 5 and 30 tokens
    want = plain(toy.session(batch=2), rows_of(group))
    rows, _ = decoded(toy, group, Beside(toy, context=20), tokens=4)
    assert [row.tokens for row in rows] == want
    assert rows[0].drafting["drafted"] > 8 and rows[1].drafting["drafted"] == 0


def test_a_draft_is_no_longer_than_it_can_be_taken_back(toy, groups, monkeypatch):
    beside, sizes = Beside(toy, 2.0), []
    opened = beside.session(1)
    kind = type("Poor", (Session,), {"capabilities": Capabilities(back=2)})
    monkeypatch.setattr(
        beside,
        "session",
        lambda batch=1: kind(opened._core.backend, 1, vocab_size=320, max_context=1300),
    )
    rows, _ = decoded(toy, groups[0][:1], beside)
    sizes = rows[0].drafting["drafted"] / rows[0].drafting["rounds"]
    assert rows[0].tokens == plain(toy.session(), rows_of(groups[0][:1]))[0] and 1 < sizes <= 2
    kind.capabilities = Capabilities(back=0)
    with pytest.raises(InputError, match="draft.model: sessions of the draft model cannot rewind"):
        decoded(toy, groups[0][:1], beside)


def test_what_it_costs_is_known_before(toy, groups):
    """One as dear as the target is not tried; a cheap one is."""
    for share, drafts in ((1.0, False), (0.05, True)):
        beside = Beside(toy, costs=replace(COSTS, seconds=(share, share)))
        rows, _ = decoded(toy, groups[0], beside, costs=COSTS)
        assert bool(rows[0].drafting["drafted"]) == drafts


def test_a_length_hears_of_every_token_and_may_end_the_draft(toy, groups):
    from accel.runtime.length import Base, Pace

    told = []

    class Short(Base, Pace):
        def begin(self, cost=None):
            return self

        def limit(self):
            return 5

        def more(self, level, logits):
            (token,), (line,) = level.tokens, logits
            assert line.shape == (320,) and line.argmax() == token
            told.append(token)
            return len(told) % 3 != 0

    rows, _ = decoded(toy, groups[0][:1], Beside(toy), length=Short())
    assert rows[0].drafting["drafted"] == len(told), "the last token of each draft too"
    assert rows[0].drafting["rounds"] == -(-len(told) // 3)


def test_without_its_model_it_says_so(toy):
    with (
        toy.session() as session,
        pytest.raises(InputError, match="draft.model: this model was built without"),
    ):
        list(
            speculated(session, rows_of([[1, 2]]), Model(), model=SimpleNamespace(draft_model=None))
        )
