"""A draft model that branches while its target verifies: the tokens of plain decoding, in fewer calls where it is
unsure.
"""

from dataclasses import dataclass, field
from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest

from accel.compiler.assemble import assemble
from accel.compiler.draft_build import _recipe
from accel.ir.errors import InputError, RecipeError
from accel.ir.recipe import Recipe
from accel.runtime.decode.context import DecodeContext
from accel.runtime.loop import _parallel
from accel.runtime.loop._foresight import Fate, Foresight
from accel.runtime.loop.pearl import Pearl
from accel.runtime.loop.specbranch import Specbranch
from accel.runtime.sample.standard import Standard
from accel.runtime.tree import ROOT
from accel.runtime.verify import Verdict, match

from ...draft_case import plain, rows_of
from ...open_case import Tables
from ...prefill_case import built
from ...verify_case import distance, outcomes

WARM = Standard(temperature=0.7, top_k=20)
PROMPTS = [[5, 17, 20, 3, 8], [9], list(range(30, 42))]
SIZE = 50


def says(held):
    """Logits [V] after tokens, by the last two of them."""
    return after(*held[-2:])


@cache
def after(*held):
    return np.random.default_rng([7, *held]).standard_normal(SIZE).astype(np.float32) * 2


def errs(every, of=says):
    """The same with the two likeliest tokens confused wherever the first divides by `every`."""

    def said(held):
        logits = of(held).copy()
        second, first = np.argsort(logits)[-2:]
        if first % every == 0:
            logits[[first, second]] = logits[[second, first]]
        return logits

    return said


class Table(Tables):
    """A session of one row over a function of its tokens."""

    def __init__(self, says):
        super().__init__(says, says, SIZE)
        self.calls = 0

    def run(self, *args, **options):
        self.calls += 1
        return super().run(*args, **options)


def one(prompt, sampler=WARM, **ends):
    return rows_of([prompt], sampler, **{"limit": 30, "max_context": 64, **ends})


def beside(session):
    """A context with a draft model of such sessions."""
    draft = SimpleNamespace(
        session=session, tokenizer=None, facts=SimpleNamespace(max_context=64, max_batch=8)
    )
    return DecodeContext(model=SimpleNamespace(draft_model=draft, tokenizer=None))


def run(loop, rows, every=3):
    """The row's tokens, and calls of the target; its session then holds what came."""
    session = Table(says)
    list(loop.tokens(session, rows, beside(lambda batch: Table(errs(every)))))
    assert session.lengths.tolist() == [rows[0].seen.size - 1]
    return rows[0].tokens, session.calls


@pytest.mark.parametrize("sampler", [Standard(), WARM])
def test_tokens_are_those_of_plain_decoding(sampler, monkeypatch):
    """Whatever the branches; a rule that takes the likeliest token is caught where rows sample."""
    for prompt in PROMPTS:
        want = plain(Table(says), one(prompt, sampler))[0]
        for every, options in ((1, {}), (3, {"threshold": 0.05}), (1000, {"branches": 2, "ahead": 3}),
                               (3, {"ahead": 1}), (1000, {"branches": 1, "threshold": 0})):  # fmt: skip
            got = one(prompt, sampler)
            assert run(Specbranch(**options), got, every)[0] == want
            assert every < 1000 or got[0].drafting["accepted"] or not sampler.greedy

    def likeliest(target, chance):
        law = target.law(ROOT)
        return Verdict((), int(law.tokens[law.weights.argmax()]))

    monkeypatch.setattr(_parallel, "match", likeliest)
    assert (run(Specbranch(), one(prompt, sampler))[0] == want) == sampler.greedy


@pytest.mark.long
@pytest.mark.parametrize("sampler", [Standard(), WARM])
def test_rows_of_a_batch_are_each_as_alone(sampler):
    """Over a model's sessions, whose draft trees are trees of calls."""
    draft = built("llama", tables={"draft": {"use": "token-recycling"}})
    context = beside(draft.session)
    want, got = (rows_of(PROMPTS, sampler, limit=12, max_context=64) for _ in range(2))
    plain(built("llama").session(3), want)
    with built("llama").session(3) as session:
        list(Specbranch(branches=2, ahead=4, threshold=0).tokens(session, got, context))
        assert session.lengths.tolist() == [row.seen.size - 1 for row in got]
    assert [row.tokens for row in got] == [row.tokens for row in want]
    assert all(row.drafting["accepted"] for row in got) or not sampler.greedy


def test_one_branch_that_never_ends_is_pearl():
    for every in (2, 1000):
        ours, theirs = one(PROMPTS[0]), one(PROMPTS[0])
        same = Specbranch(branches=1, ahead=4, threshold=0)
        assert run(same, ours, every) == run(Pearl(4), theirs, every)
        assert ours[0].drafts == theirs[0].drafts and ours[0].drafting == theirs[0].drafting


def figures(loop, every=2):
    """Calls of the target, and drafted tokens that fell, of a greedy row."""
    got = one(PROMPTS[0], Standard())
    _, calls = run(loop, got, every)
    return calls, got[0].drafting["drafted"] - got[0].drafting["accepted"]


def test_branches_catch_what_the_draft_model_confuses(monkeypatch):
    """Fewer calls; and where unsure places end drafts, fewer tokens fall. Branches that are confused catch nothing."""
    options = {"ahead": 6, "threshold": 0}
    one, two = (figures(Specbranch(branches=n, **options)) for n in (1, 2))
    assert two[0] < one[0]
    assert figures(Specbranch(branches=2, ahead=6, threshold=0.3))[1] < two[1]
    drafted = Specbranch.drafted

    def confused(self, *args):
        found = drafted(self, *args)
        return {i: dict(zip(one, reversed(one.values()), strict=True)) for i, one in found.items()}

    monkeypatch.setattr(Specbranch, "drafted", confused)
    assert figures(Specbranch(branches=2, **options))[0] > two[0]


@dataclass
class Foretold(Foresight):
    """A foresight that is a function of the row's tokens."""

    fates: object
    rows: object
    seen: list = field(default_factory=list)

    def fate(self, row, token):
        assert self.rows[row].seen[-1] == token
        return self.fates(self.rows[row].seen)

    def observe(self, row, drafted, stood):
        self.seen.append((drafted, stood))


def foretold(fates, sampler=WARM, every=2, **options):
    """Of drafts that are verified as `fates` says: the row, what was seen of them, and calls of the target."""
    seen = []

    class Loop(Specbranch):
        goes_on = True

        def foresight(self, session, rows, context):
            return Foretold(fates, rows, seen)

    got = one(PROMPTS[0], sampler)
    _, calls = run(Loop(**{"threshold": 0.3, **options}), got, every)
    return got[0], seen, calls


@pytest.mark.parametrize("sampler", [Standard(), WARM])
def test_how_a_draft_fares_decides_what_of_it_is_verified(sampler):
    """None, the part that the draft model is sure of, or all; the tokens are those of plain decoding whatever is
    foretold. Of what ends by the threshold alone, the same is verified as where all is said to stand in part.
    """
    want = plain(Table(says), one(PROMPTS[0], sampler))[0]
    none, some, whole = (foretold(lambda seen, f=f: f, sampler) for f in Fate)
    mixed = foretold(lambda seen: Fate(int(seen.sum()) % 3), sampler)
    assert all(of[0].tokens == want for of in (none, some, whole, mixed))
    assert not none[1] and none[2] > some[2], "every token by a call of its own"
    by_threshold = one(PROMPTS[0], sampler)
    _, calls = run(Specbranch(threshold=0.3), by_threshold, 2)
    assert (some[2], some[0].drafting) == (calls, by_threshold[0].drafting)
    assert [n for n, _ in whole[1][:2]] == [5, 5]
    assert whole[0].drafting["drafted"] > some[0].drafting["drafted"]


def test_a_foresight_that_knows_makes_nothing_fall():
    """Only drafts that stand whole are verified, of a draft model that errs: none of their tokens falls. The control
    says the contrary.
    """
    line = one(PROMPTS[0], Standard())
    want = plain(Table(says), line)[0]
    text, say = line[0].seen.tolist(), errs(7)

    def knows(seen):
        held, stood = seen.tolist(), 0
        while stood < 5 and len(held) < len(text) and int(say(held).argmax()) == text[len(held)]:
            held.append(text[len(held)])
            stood += 1
        return Fate.of(5, stood)

    found, seen, _ = foretold(
        lambda s: Fate.ALL if knows(s) is Fate.ALL else Fate.NONE, Standard(), 7
    )
    _, wrong, _ = foretold(lambda s: Fate.NONE if knows(s) is Fate.ALL else Fate.ALL, Standard(), 7)
    assert found.tokens == want and seen
    assert all(drafted == stood for drafted, stood in seen[:-1])
    assert not any(drafted == stood for drafted, stood in wrong[:-1])


def law(loop, length=2):
    """The law of a row's first tokens behind a prompt, over tables of three tokens: run for every way that the row's
    draws can fall.
    """

    def little(seed):
        @cache
        def of(*held):
            rng = np.random.default_rng([seed, *held])
            return rng.standard_normal(3).astype(np.float32) * 1.5

        return lambda held: of(*held[-2:])

    target, draft = little(1), little(2)

    class Small(Tables):
        def __init__(self, says):
            super().__init__(says, says, 3)

    def tokens(chance):
        rows = one([1, 2], Standard(temperature=1.0), limit=length)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_parallel, "Chance", lambda rng: chance)
            patch.setattr(rows[0], "pick", lambda logits: chance.draw(drawn(logits)))
            list(loop.tokens(Small(target), rows, beside(lambda batch: Small(draft))))
        return tuple(rows[0].tokens)

    def drawn(logits):
        return Standard(temperature=1.0).distribution(logits, np.zeros(0, np.int64))

    def alone(chance):
        held = [1, 2]
        for _ in range(length):
            held.append(chance.draw(drawn(target(tuple(held)))))
        return tuple(held[2:])

    return distance(outcomes(tokens), outcomes(alone))


def test_the_law_of_tokens_is_the_targets(monkeypatch):
    """By enumeration, whatever is foretold. The control is the rule of the authors' code: of the branches that one is
    tried whose token the target finds likeliest, by one test of p/q against the draft model's odds.
    """

    class Foresees(Specbranch):
        goes_on = True

        def foresight(self, session, rows, context):
            return Foretold(lambda seen: Fate(int(seen.sum()) % 3), rows)

    for loop in (Specbranch(branches=2, ahead=3, threshold=0.4), Foresees(branches=2, ahead=3)):
        assert law(loop, 4) < 1e-12

    def tried(target, chance):
        of = target.law(ROOT)
        best = int(of.weights.argmax())
        if not len(target.tree) and chance.accept(of.probabilities[best] / 0.5):
            return Verdict((), int(of.tokens[best]))
        return match(target, chance)

    monkeypatch.setattr(_parallel, "match", tried)
    assert law(Specbranch(branches=2, ahead=3, threshold=0.4), 4) > 0.05


def test_rows_end_where_they_would():
    for ends in ({"limit": 1}, {"limit": 5}, {"max_context": 20}):
        want, got = (one(PROMPTS[2], **ends) for _ in range(2))
        plain(Table(says), want)
        run(Specbranch(), got, 1000)
        assert (got[0].tokens, got[0].finish) == (want[0].tokens, want[0].finish)


def test_what_it_needs_is_built_or_said():
    plan = assemble(Recipe.load("specbranch"))
    assert plan.grade == "lossless" and "draft" in _recipe(plan).tables, (
        "the draft model takes trees"
    )
    assert "draft" not in _recipe(assemble(Recipe.load("pearl"))).tables
    for options, words in (({"branches": 0}, "branches is 0"), ({"ahead": 0}, "ahead is 0"),
                           ({"threshold": 1.0}, "threshold is 1.0; give at least 0 and less than 1")):  # fmt: skip
        with pytest.raises(RecipeError, match=f"loop.specbranch: {words}"):
            Specbranch(**options)
    with (
        built("llama").session() as session,
        pytest.raises(InputError, match="loop.specbranch: .*its draft model"),
    ):
        next(Specbranch().tokens(session, rows_of(PROMPTS[:1]), DecodeContext()))
    chains = beside(built("llama").session)
    with (
        built("llama").session() as session,
        pytest.raises(InputError, match="take no draft trees"),
    ):
        list(Specbranch().tokens(session, rows_of(PROMPTS[:1]), chains))
