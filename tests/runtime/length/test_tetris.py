"""tetris: a round's budget goes to the tokens that are worth most, rows get what they get alone, and the published form
is not lossless.
"""

from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest

from accel.compiler.assemble import assemble
from accel.ir.errors import RecipeError
from accel.ir.recipe import Recipe
from accel.runtime.decode.context import DecodeContext
from accel.runtime.draft.model import Model
from accel.runtime.length.tetris import Tetris
from accel.runtime.sample.standard import Standard
from accel.runtime.session.session import Session
from accel.runtime.speculation.round_cost import unmeasured_cost
from accel.runtime.tree import Tree
from accel.runtime.tree.chain import Chain
from accel.runtime.verify.sample_match import SampleMatch
from accel.runtime.verify.spec_chain import SpecChain

from ...draft_case import Says, plain, rows_of, speculated
from ...open_case import Opened, Tables
from ...verify_case import World, sampled
from ..test_draft_model import Beside

SIZE, WARM = 5, Standard(temperature=0.8)
PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10], [11, 3]]


def says(held):
    """Odds that are sharp after some tokens and flat after others."""
    rng = np.random.default_rng([len(held), *held[-2:]])
    return (rng.standard_normal(SIZE) * (0.5 + 2 * (held[-1] % 3))).astype(np.float32)


def drafts(length, rule, sampler, seed=0, rows=4):
    """A round's chains, the rows, and how many times the draft model was called."""
    prompts = [[seed % SIZE, i % SIZE, (seed + i) % SIZE] for i in range(rows)]
    made, calls = rows_of(prompts, sampler, seed), []

    class Counted(Tables):
        def run(self, *given, **options):
            calls.append(1)
            return super().run(*given, **options)

    def session(batch):
        return Counted(says, says, SIZE, batch)

    facts = SimpleNamespace(kv=None, vocab_size=SIZE, max_context=64, max_batch=rows)
    beside = SimpleNamespace(session=session, tokenizer=None, facts=facts)
    model = SimpleNamespace(draft_model=beside, tokenizer=None, facts=facts)
    context = DecodeContext({"tree": Chain(), "verify": rule, "length": length}, None, model)
    paces = length.open(made, unmeasured_cost)
    drafters = Model().open(session(rows), made, context)
    limits = paces.limits(range(rows))
    trees = drafters.draft(limits, paces)
    kept = paces.keeps({i: len(tree) for i, tree in trees.items()})
    return {i: tree.head(kept[i]) for i, tree in trees.items()}, made, len(calls)


def chance(held, token=None):
    p = np.exp(says(held).astype(np.float64))
    return (p.max() if token is None else p[token]) / p.sum()


def worths(tree, row, most):
    """Of a chain's tokens before they were drawn, and of the one behind it, if there may be one."""
    found, so_far, held = [], 1.0, row.seen.tolist()
    for token in tree.tokens.tolist():
        found.append(so_far * chance(held))
        so_far *= chance(held, token)
        held.append(token)
    return found, so_far * chance(held) if len(tree) < most else 0.0


@pytest.mark.parametrize("drawn", [True, False], ids=["drawn", "chosen"])
def test_no_token_is_left_out_that_is_worth_more(drawn):
    """By brute force: what was drafted is worth more than all that could have come next; and the budget is spent."""
    rule, sampler = (SpecChain(), WARM) if drawn else (SampleMatch(), Standard())
    uneven = 0
    for seed in range(12):
        trees, rows, calls = drafts(Tetris(3, 2), rule, sampler, seed)
        assert sum(map(len, trees.values())) == 3 * 4 and max(map(len, trees.values())) <= 5
        told = [worths(trees[i], row, 5) for i, row in enumerate(rows)]
        assert min(min(own, default=1) for own, _ in told) >= max(after for _, after in told) - 1e-9
        uneven += len({len(tree) for tree in trees.values()}) > 1
        assert 5 < calls <= 12 if drawn else calls == 5
    assert uneven > 6, "rows are alike: nothing is tested"


def test_a_budget_that_goes_by_something_else_is_caught(monkeypatch):
    monkeypatch.setattr("accel.runtime.length.tetris._chance", lambda *_: 0.0)
    with pytest.raises(AssertionError):
        test_no_token_is_left_out_that_is_worth_more(True)


def test_where_drafts_are_chosen_both_forms_check_the_same_tokens():
    """The published one in `tokens` + `extra` calls of the draft model, also where rows sample."""
    for seed in range(12):
        own, _, _ = drafts(Tetris(3, 2), SampleMatch(), WARM, seed)
        theirs, _, calls = drafts(Tetris(3, 2, published=True), SampleMatch(), WARM, seed)
        assert [t.tokens.tolist() for t in own.values()] == [
            t.tokens.tolist() for t in theirs.values()
        ]
        assert calls == 5


def test_rows_that_are_alike_draft_as_many(monkeypatch):
    monkeypatch.setattr(f"{__name__}.says", lambda held: np.zeros(SIZE, np.float32))
    for form in (False, True):
        trees, _, _ = drafts(Tetris(3, 2, form), SpecChain(), WARM)
        assert [len(tree) for tree in trees.values()] == [3] * 4
    single, _, _ = drafts(Tetris(3, 2), SpecChain(), WARM, rows=1)
    assert len(single[0]) == 3


def batch(toy, prompts, sampler, length, drafter=None, limits=(24, 9, 17, 24), seeds=None):
    """Rows' tokens by a drafting batch, and the drafted tokens of each of its calls."""
    widths, run = [], Session.run

    def counted(self, tokens, lengths=None, **options):
        if self is session and np.shape(tokens)[1] > 1 and not options.keys() - {"here"}:
            counts = np.full(len(tokens), np.shape(tokens)[1]) if lengths is None else lengths
            widths.append(
                (
                    int(np.maximum(np.asarray(counts) - 1, 0).sum()),
                    int(np.sum(np.asarray(counts) > 0)),
                )
            )
        return run(self, tokens, lengths, **options)

    rows = []
    for i, prompt in enumerate(prompts):
        rows += rows_of([prompt], sampler, seeds[i] if seeds else 0, limit=limits[i])
    with toy.session(batch=len(rows)) as session, pytest.MonkeyPatch.context() as patch:
        patch.setattr(Session, "run", counted)
        beside = Beside(toy, 0.7)
        list(
            speculated(
                session,
                rows,
                drafter or Model(),
                "sample-match",
                length=length,
                model=beside.target,
            )
        )
        assert session.lengths.tolist() == [row.seen.size - 1 for row in rows], "of ended rows too"
    return rows, widths


@pytest.mark.parametrize("sampler", [Standard(), WARM])
def test_each_row_gets_what_it_gets_alone(toy, sampler):
    """Rows that end at different times, in any order; no call checks more than the budget of the rows that run."""
    seeds, order, length = [3, 4, 5, 6], [2, 0, 3, 1], Tetris(2, 3)
    limits = (24, 9, 17, 24)
    rows, widths = batch(toy, PROMPTS, sampler, length, seeds=seeds)
    got = [row.tokens for row in rows]
    assert all(drafted <= 2 * live for drafted, live in widths[1:])
    assert len({drafted for drafted, _ in widths[1:]}) > 1
    mixed, _ = batch(
        toy,
        [PROMPTS[i] for i in order],
        sampler,
        length,
        limits=[limits[i] for i in order],
        seeds=[seeds[i] for i in order],
    )
    assert [row.tokens for row in mixed] == [got[i] for i in order]
    for i, prompt in enumerate(PROMPTS):
        alone = rows_of([prompt], sampler, seeds[i], limit=limits[i])
        assert plain(toy.session(batch=1), alone) == [got[i]]
    assert sum(row.drafting["accepted"] for row in rows) > 0


def test_the_published_form_is_not_lossless():
    """Where tokens are drawn, those that are dropped are missed; the other form is exact over the same tables."""
    for published in (False, True):
        case = Opened(
            Model(), Chain(), SpecChain(), World(sampled(), "same", 6, size=2),
            limit=2, length=Tetris(1, 1, published), beyond=1, batch=2,
        )  # fmt: skip
        gap = case.gap(2)
        assert (gap > 0.1) if published else (gap < 1e-12)
        assert {(1, 1), (0, 2)} <= case.drafts
    assert Tetris().grade == "lossless" and Tetris(published=True).grade == "approximate"


@dataclass(frozen=True)
class Joined(Tetris):
    """Opened for greedy rows, whose places others then take; `stale`: it does not hear of that."""

    stale: bool = False

    def open(self, rows, cost):
        known = rows_of([[0]] * len(rows), Standard())
        paces = super().open(known, cost)
        known[:] = known if self.stale else rows
        return paces


def test_rows_that_join_are_drafted_for_as_they_sample():
    """Greedy rows draft at once, which would be biased for one that samples and joins them."""
    for stale in (False, True):
        case = Opened(
            Model(), Chain(), SpecChain(), World(sampled(), "same", 6, size=2),
            limit=2, length=Joined(1, 1, stale=stale), beyond=1, batch=2,
        )  # fmt: skip
        assert (case.gap(2) > 0.1) if stale else (case.gap(2) < 1e-12)


def test_a_drafter_that_does_not_ask_keeps_to_the_budget(toy):
    drafter = Says(lambda seen, limit: Tree.chain(seen[-limit:] % 7))
    _, widths = batch(toy, PROMPTS, Standard(), Tetris(2, 3), drafter)
    assert widths and all(drafted <= 2 * live for drafted, live in widths[1:])


def test_the_recipe_and_what_it_refuses():
    plan = assemble(Recipe.load("tetris"))
    assert plan.methods["length"] == Tetris() and plan.grade == "distribution-exact"
    tables = Recipe.load("tetris").tables
    exact = {**tables, "verify": {"use": "sample-match"}}
    assert assemble(Recipe(tables=exact)).grade == "lossless"
    published = {**tables, "length": {"use": "tetris", "published": True}}
    assert assemble(Recipe(tables=published)).grade == "approximate"
    for change in ({"draft": {"use": "prompt-lookup"}}, {"tree": {"use": "static"}}):
        with pytest.raises(RecipeError, match="length = tetris cannot be combined with"):
            assemble(Recipe(tables=tables | change))
    for options, words in (({"tokens": 0}, "tokens is 0; give 1 to 256"),
                           ({"extra": -1}, "extra is -1; give 0 to 256")):  # fmt: skip
        with pytest.raises(RecipeError, match=f"length.tetris: {words}"):
            Tetris(**options)
