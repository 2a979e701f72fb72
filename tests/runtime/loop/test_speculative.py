"""The loop that drafts, over the toy: the same tokens as without, whatever is drafted, and a session that follows."""

import itertools

import numpy as np
import pytest

from accel.ir.errors import InputError
from accel.runtime.artifact.artifact import open_artifact
from accel.runtime.backends import clock
from accel.runtime.decode.costs import Costs
from accel.runtime.draft import Drafters
from accel.runtime.draft.iad import Iad
from accel.runtime.draft.prompt_lookup import PromptLookup
from accel.runtime.inputs.text import Tokenizer
from accel.runtime.loop.speculative import reach
from accel.runtime.model.compiled import CompiledModel
from accel.runtime.sample.standard import Standard
from accel.runtime.session.observers.observer import Capabilities
from accel.runtime.session.session import Session
from accel.runtime.speculation.guard import TRIAL
from accel.runtime.tree import Tree

from ...draft_case import Known, Says, plain, rows_of, speculated, surprise

SIZES = (5, 1, 30)


@pytest.fixture(scope="module")
def prompts(toy):
    """Groups of three prompts of different lengths; every second one repeats itself."""
    rng, groups = np.random.default_rng(5), []
    for group in range(8):
        some = [rng.integers(0, 9 if group % 2 else toy.vocab, n).tolist() for n in SIZES]
        groups.append(some)
    return groups


def futures(toy, group, sampler=None, **ends):
    """What plain decoding gives: prompt -> tokens."""
    rows = rows_of(group, *([sampler] if sampler else []), **ends)
    return {
        tuple(p): t for p, t in zip(group, plain(toy.session(batch=len(group)), rows), strict=True)
    }


def drafters(found):
    """What is tried; `found`: the tokens that come."""
    yield from (Known(found), Known(found, wrong=3), Known(found, wrong=1), Known(found, most=2))
    yield from (
        PromptLookup(),
        PromptLookup(ngram=1),
        Iad(),
        Says(lambda seen, limit: Tree.chain([])),
    )


def check_session(toy, session, rows):
    """It holds just what came, but for the last token, and nothing is left of what fell."""
    for i, row in enumerate(rows):
        assert session.lengths[i] == row.prompt.size + len(row.tokens) - 1
    last = np.array([[row.tokens[-1]] for row in rows])
    for got, row in zip(session.run(last), rows, strict=True):
        np.testing.assert_allclose(got[0], toy.oracle(row.seen)[-1], atol=1e-3, rtol=1e-3)


def check_greedy(toy, groups, engine="ort"):
    for group in groups:
        found = futures(toy, group)
        for drafter in drafters(found):
            with toy.session(engine, batch=len(group)) as session:
                rows = rows_of(group)
                came = [[] for _ in group]
                for i, token in speculated(session, rows, drafter):
                    came[i].append(token)
                assert came == [row.tokens for row in rows] == [found[tuple(p)] for p in group]
                check_session(toy, session, rows)


def test_greedy_tokens_are_those_of_plain_decoding(toy, prompts):
    check_greedy(toy, prompts)


def test_and_on_the_other_target(toy, prompts):
    check_greedy(toy, prompts[:2], "eager")


def test_a_loop_that_forgets_to_rewind_is_caught(toy, prompts, monkeypatch):
    monkeypatch.setattr(Session, "rewind", lambda self, length: None)
    with pytest.raises(AssertionError):
        check_greedy(toy, prompts[:2])


def test_a_good_draft_saves_calls_and_a_bad_one_costs_none(toy, prompts):
    (group,) = prompts[:1]
    found = futures(toy, group)
    for drafter, calls in ((Known(found), 1 + 3), (Known(found, wrong=1), 24)):
        with toy.session(batch=3) as session:
            rows = rows_of(group)
            list(speculated(session, rows, drafter))
            assert session.stats["calls"] == calls
    figures = rows[0].drafting
    assert figures["rounds"] == 22 and figures["accepted"] == 0 < figures["drafted"], (
        "the last step drafts nothing"
    )


@pytest.mark.parametrize("temperature", [0.7, 1.3])
def test_sample_match_draws_what_plain_sampling_draws(toy, prompts, temperature):
    sampler = Standard(temperature=temperature, top_k=40, repetition_penalty=1.2)
    for seed, group in enumerate(prompts):
        want = plain(toy.session(batch=3), rows_of(group, sampler, seed))
        found = {tuple(p): t for p, t in zip(group, want, strict=True)}
        for drafter in drafters(found):
            with toy.session(batch=3) as session:
                rows = rows_of(group, sampler, seed)
                list(speculated(session, rows, drafter, "sample-match"))
                assert [row.tokens for row in rows] == want
                check_session(toy, session, rows)


class Until:
    """A text that ends with a token."""

    def __init__(self, token):
        self.token = token

    def __call__(self, token):
        return token == self.token

    def end(self):
        return False


ENDS = [
    ("length", {"limit": 1}), ("length", {"limit": 2}), ("length", {"limit": 7}), ("context", {"max_context": 37}),
    ("context", {"max_context": 31}), ("eos", {"at": 3}), ("eos", {"at": 0}), ("stop", {"at": 4}), ("stop", {"at": 0}),
]  # fmt: skip


@pytest.mark.parametrize(("finish", "ends"), ENDS)
@pytest.mark.parametrize("wrong", [0, 4])
def test_rows_end_where_they_would(toy, prompts, finish, ends, wrong):
    """Inside a run that stands, too; nothing after it comes, and the session does not hold it."""
    group = prompts[2]
    free, ends = futures(toy, group), dict(ends)
    at = ends.pop("at", None)
    if at is not None:
        token = free[tuple(group[2])][at]
        ends |= {"eos": [token]} if finish == "eos" else {"watch": Until(token)}
    want = rows_of(group, **ends)
    plain(toy.session(batch=3), want)
    with toy.session(batch=3) as session:
        rows = rows_of(group, **ends)
        list(speculated(session, rows, Known(free, wrong=wrong)))
        assert [(r.tokens, r.finish) for r in rows] == [(r.tokens, r.finish) for r in want]
        assert rows[2].finish == finish
        check_session(toy, session, rows)


def test_rows_without_room_take_nothing(toy):
    with toy.session(batch=2) as session:
        rows = rows_of([[1, 2, 3], [4]], max_context=3)
        list(speculated(session, rows, PromptLookup()))
        assert [row.finish for row in rows] == ["context", "context"] and rows[0].tokens == []
        alone = rows_of([[4]], max_context=3)
        plain(toy.session(), alone)
        assert rows[1].tokens == alone[0].tokens
    with toy.session() as session:
        assert list(speculated(session, rows_of([[1, 2]], max_context=2), PromptLookup())) == []


def test_an_iteration_that_is_closed_leaves_a_session_to_go_on_with(toy, prompts):
    group = prompts[3]
    found = futures(toy, group)
    for stop in range(3, 3 * 24, 5):
        with toy.session(batch=3) as session:
            rows = rows_of(group)
            tokens = speculated(session, rows, Known(found, wrong=5), tokens=4)
            list(itertools.islice(tokens, stop))
            tokens.close()
            check_session(toy, session, rows)


def test_a_rule_that_fails_leaves_what_was_judged(toy, prompts):
    """The second row's sampler breaks in a round: the first row's tokens stand, and the session agrees."""

    class Breaks(Standard):
        def distribution(self, logits, seen):
            if seen.size > 8:
                raise InputError("broken")
            return super().distribution(logits, seen)

    group = prompts[4]
    found = futures(toy, group)
    with toy.session(batch=3) as session:
        rows = rows_of(group)
        rows[1].sampler = Breaks()
        with pytest.raises(InputError, match="broken"):
            list(speculated(session, rows, Known(found), tokens=4))
        check_session(toy, session, rows)


BAD = {
    "drafted 4 tokens but 3 were requested": lambda seen, limit: Tree.chain([1] * (limit + 1)),
    "drafted token 320, but the model's tokens are 0..319": lambda seen, limit: Tree.chain(
        [1, 320]
    ),
    "drafted a branching tree": lambda seen, limit: Tree([1, 2], [-1, -1]),
}


@pytest.mark.parametrize("words", BAD)
def test_a_draft_that_cannot_be_checked_is_named(toy, words):
    with toy.session() as session, pytest.raises(InputError, match=f"^draft.draft-case {words}"):
        list(speculated(session, rows_of([[1, 2, 3]]), Says(BAD[words]), tokens=3))


def test_a_drafter_is_told_what_became_of_its_draft(toy, prompts):
    told = []

    class Listens(Says):
        def observe(self, tree, verdict, logits):
            assert len(logits) == len(tree) + 1
            told.append((len(verdict.path), verdict.token, len(logits)))

    (future,) = futures(toy, prompts[0][:1], limit=9).values()
    drafts = {1: future[1:3], 4: [(future[4] + 1) % 9, 0], 5: []}
    drafter = Listens(lambda seen, limit: Tree.chain(drafts.get(seen.size - 5, [])))
    with toy.session() as session:
        list(speculated(session, rows_of(prompts[0][:1], limit=9), drafter))
    assert told == [(2, future[3], 3), (0, future[4], 3), *((0, token, 1) for token in future[5:])]


def test_drafters_of_all_rows_are_asked_in_one_call_and_closed(toy, prompts):
    """A row that is missing drafts nothing, each row is told its own, and the end comes however it comes."""
    group, asked, told, closed = prompts[5], [], [], []
    found = futures(toy, group)

    class Together(Drafters):
        def __init__(self, rows):
            self.rows = rows

        def draft(self, limits, more):
            asked.append(dict(limits))
            done = {i: len(self.rows[i].tokens) for i in limits if i != 1}
            return {
                i: Tree.chain(found[tuple(group[i])][n : n + limits[i]]) for i, n in done.items()
            }

        def observe(self, row, tree, verdict, logits):
            told.append((row, len(verdict.path)))

        def close(self):
            closed.append(True)

    class Method(Says):
        def open(self, session, rows, context):
            assert session.length == 0 and context.methods["draft"] is self
            return Together(rows)

    with toy.session(batch=3) as session:
        rows = rows_of(group)
        list(speculated(session, rows, Method(None), tokens=4))
        assert [row.tokens for row in rows] == [found[tuple(p)] for p in group]
        check_session(toy, session, rows)
    assert (
        asked[0] == {0: 4, 1: 4, 2: 4} and told[:3] == [(0, 4), (1, 0), (2, 4)] and closed == [True]
    )
    assert asked[-1] == {1: 1}, "the rows that ended are not asked"
    with toy.session(batch=3) as session:
        tokens = speculated(session, rows_of(group), Method(None))
        next(tokens)
        tokens.close()
    assert closed == [True, True]


def test_what_a_session_can_do_bounds_the_draft():
    assert reach(Capabilities()) == 511
    assert reach(Capabilities(width=32)) == 31
    assert reach(Capabilities(back=8)) == 8
    for poor in (Capabilities(width=1), Capabilities(back=0)):
        with pytest.raises(
            InputError, match="loop: drafts are .* sessions of this model .* loop = autoregressive"
        ):
            reach(poor)


def test_a_draft_is_no_longer_than_a_session_can_take_back(toy, monkeypatch):
    monkeypatch.setattr(Session, "capabilities", Capabilities(back=2))
    longest = []
    drafter = Says(lambda seen, limit: longest.append(limit) or Tree.chain([]))
    with toy.session() as session:
        list(speculated(session, rows_of([[1, 2]], limit=6), drafter))
    assert longest == [2, 2, 2, 1], "and no longer than what may still come after it"


def test_text_stops_and_streams_as_without_a_draft(toy):
    """The whole model: text, stop strings within a draft, pieces as they come, and figures."""
    facts, tokenizer = open_artifact(toy.path).facts, Tokenizer(toy.path / "tokenizer.json")
    tables = {"draft": {"use": "prompt-lookup"}, "loop": {"use": "speculative"}}
    without, drafts = (
        CompiledModel(toy.engines["eager"], facts, tokenizer=tokenizer, recipe={"tables": each})
        for each in ({}, tables)
    )
    accepted = 0
    for prompt in toy.corpus:
        whole = without.generate(prompt, 60, eos=[])
        drafts._methods["draft"] = Known(
            {tuple(tokenizer.encode(prompt)): whole.tokens[0]}, wrong=6
        )
        middle = whole.text[0][len(whole.text[0]) // 2 :][:2]
        for stop in (None, middle, whole.text[0][:1]):
            want = without.generate(prompt, 60, eos=[], stop=stop)
            got = drafts.generate(prompt, 60, eos=[], stop=stop)
            assert (got.text, got.tokens) == (want.text, want.tokens)
            assert got.stats["finish"] == want.stats["finish"]
            assert "".join(drafts.stream(prompt, 60, eos=[], stop=stop)) == want.text[0]
            accepted += got.stats["speculation"]["accepted"]
            assert got.stats["costs"], "measured when it first generates"
    assert accepted > 0
    assert without.generate([1], 2).stats["speculation"] is None


FREE, DEAR = Costs((1, 32), (1.0, 1.0)), Costs((1, 32), (1.0, 32.0))


def test_drafts_that_do_not_pay_are_left_for_a_while(toy, prompts, monkeypatch):
    monkeypatch.setattr(clock, "now", lambda: 0.0)  # a drafter that takes no time
    group, rounds = prompts[0], {}
    found = futures(toy, group, limit=120)
    for costs, wrong in ((FREE, 1), (DEAR, 1), (DEAR, 0)):
        with toy.session(batch=3) as session:
            rows = rows_of(group, limit=120)
            drafter = Known(found, wrong=wrong, free=False)
            list(speculated(session, rows, drafter, costs=costs))
            assert [row.tokens for row in rows] == list(found.values())
            rounds[costs is FREE, wrong] = dict(rows[0].drafting)
    assert rounds[True, 1]["fallback"] == 0 and rounds[True, 1]["rounds"] == 118
    assert rounds[False, 1]["fallback"] + rounds[False, 1]["rounds"] == 119, (
        "a step for each token after the first"
    )
    assert rounds[False, 1]["rounds"] <= 2 * TRIAL
    assert rounds[False, 0]["fallback"] == 0, "a draft that stands costs what its tokens would have"


class Draws(Says):
    """Two tokens drawn from a q of its own, or from another than it says."""


def drawing(rng, q, honest=True):
    def says(seen, limit):
        law = q if honest else np.eye(len(q))[q.argmax()]
        tokens = rng.choice(len(q), min(limit, 2), p=law)
        return Tree.chain(tokens, np.tile(q, (len(tokens), 1)))

    return Draws(says)


def odds(toy, rule, honest=True):
    """See `surprise`; the drafter draws from odds of its own over what the target may say."""

    def drafter(law):
        q = np.zeros(toy.vocab)
        possible = sorted({token for past in law for token in past})
        q[possible] = np.random.default_rng(1).exponential(size=len(possible))
        return drawing(np.random.default_rng(2), q / q.sum(), honest)

    return surprise(toy, rule, drafter)


@pytest.mark.few(1)
@pytest.mark.parametrize("rule", ["spec-chain", "block-verify"])
def test_sampled_tokens_have_the_odds_of_the_target(toy, rule):
    assert odds(toy, rule) < 4


@pytest.mark.long
def test_a_draft_that_lies_about_its_odds_is_caught(toy):
    assert odds(toy, "spec-chain", honest=False) > 8
