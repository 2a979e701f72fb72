"""Trees in sessions: tokens are those of plain decoding, rows keep paths of their own, and nothing else is left."""

from types import SimpleNamespace

import numpy as np
import pytest

from accel.compiler.assemble import assemble
from accel.ir.errors import AccelError, RecipeError
from accel.ir.recipe import Recipe
from accel.runtime.decode.costs import Costs
from accel.runtime.draft.model import Model
from accel.runtime.draft.token_recycling import TokenRecycling
from accel.runtime.length.fixed import Fixed
from accel.runtime.sample import Distribution
from accel.runtime.sample.standard import Standard
from accel.runtime.speculation.guard import Guard
from accel.runtime.tree import Tree, grown
from accel.runtime.tree.dyspec import Dyspec
from accel.runtime.tree.eagle_tree import EagleTree
from accel.runtime.tree.sequoia import Sequoia
from accel.runtime.tree.static import Static
from accel.runtime.verify import Chance

from .draft_case import Says, plain, rows_of, speculated, surprise
from .grow_case import Asked
from .prefill_case import built
from .test_speculation import CASES, texts

RECYCLING = {"draft": {"use": "token-recycling"}}
REFUSED = {
    "quest": "kv.select = quest cannot be combined with tree = static",
    "paged-prefix": "kv.reuse = paged-prefix cannot be combined with tree = static",
    "promptdistill": "deeper layers use other slots",
}


def recycled(model, prompts, tree=None, rule="sample-match", sampler=None, kept=int, **ends):
    """Rows decoded with trees, in a session that then holds what came."""
    ends = {"max_context": 64} | ends
    with model.session(len(prompts)) as session:
        rows = rows_of(prompts, sampler or Standard(), **ends)
        list(speculated(session, rows, TokenRecycling(), rule, 12, tree=tree or Static()))
        for i, row in enumerate(rows):
            assert session.lengths[i] == kept(row.prompt.size) + len(row.tokens) - 1
        last = np.array([[row.tokens[-1]] for row in rows])
        after = session.run(last)[:, 0] if max(session.lengths) < 64 else None
    return rows, after


@pytest.mark.few(1)
@pytest.mark.parametrize("name", [n for n in CASES if n not in REFUSED])
def test_tokens_are_those_of_plain_decoding(name):
    """Greedy, of tiny models none of whose tokens is near a tie, with every cache that takes trees."""
    model, without, accepted = (
        built("llama", tables=CASES[name] | RECYCLING),
        built("llama", tables=CASES[name]),
        0,
    )
    for seed, tree in enumerate((Static(), Sequoia())):
        prompts = texts(50, 3, seed, 30)
        want = plain(without.session(3), rows_of(prompts, max_context=64))
        rows, _ = recycled(
            model, prompts, tree, kept=lambda n: min(n, 12) if name == "gemfilter" else n
        )
        assert [row.tokens for row in rows] == want
        accepted += sum(row.drafting["accepted"] for row in rows)
        nodes = sum(row.drafting["drafted"] for row in rows)
        assert sum(deep * n for row in rows for (deep, _), n in row.drafts.items()) < nodes, (
            "places, not nodes"
        )
    assert accepted > 0


def test_a_session_holds_what_stands_and_nothing_else():
    """Rows of a batch that accept different numbers, in a session that goes on as one that never drafted."""
    model = built("llama", tables=RECYCLING)
    prompts = texts(50, 3, 1, 30)
    rows, after = recycled(model, prompts, limit=20)
    assert len({tuple(sorted(row.drafts.items())) for row in rows}) > 1, (
        "rows accept different numbers"
    )
    for row, logits in zip(rows, after, strict=True):
        with model.session() as session:
            np.testing.assert_allclose(session.run([row.seen])[0, -1], logits, atol=1e-4)


def test_a_draft_is_told_by_its_levels(monkeypatch):
    """A path that stands to its end is a draft that stands, however many tokens were drafted beside it; the guard
    hears the same, and how many tokens the call had.
    """
    model, told, weighed = built("llama", tables=RECYCLING), [], []
    prompts = texts(50, 2, 3, 20)
    rows = rows_of(prompts, max_context=64, limit=12)
    plain(model.session(2), rows)
    found = [row.seen.tolist() for row in rows]

    class Hears(Fixed):
        def begin(self, cost):
            return Hears(self.tokens)

        def observe(self, drafted, accepted):
            told.append((drafted, accepted))

    def forked(seen, limit):
        """The next two tokens, and beside each one that does not come."""
        whole = next(f for f in found if f[: seen.size] == seen.tolist())
        right = whole[seen.size : seen.size + 2]
        if limit < 4 or len(right) < 2:
            return Tree.chain([])
        wrong = [(token + 1) % 50 for token in right]
        return Tree([wrong[0], right[0], right[1], wrong[1]], [-1, -1, 1, 1])

    monkeypatch.setattr(Guard, "observe", lambda self, *given: weighed.append(given))
    costs = Costs((1, 32), (1.0, 1.0))
    with model.session(2) as session:
        rows = rows_of(prompts, max_context=64, limit=12)
        length = Hears(6)
        list(speculated(session, rows, Says(forked), "sample-match", length=length, costs=costs))
    assert [row.seen.tolist() for row in rows] == found
    assert len(told) > 4 and set(told) == {(2, 2)}
    assert weighed and all(set(given[1]) == {(2, 2)} and given[5] == 4 for given in weighed)


@pytest.mark.parametrize("limit", [1, 2, 3, 5, 40])
def test_trees_fit_what_is_left(limit):
    """Of new tokens, and of the context (a prompt of 30, and room for 34 at most)."""
    model = built("llama", tables=RECYCLING)
    prompts = texts(50, 2, 2, 30)
    want = plain(model.session(2), rows_of(prompts, max_context=64, limit=limit))
    rows, _ = recycled(model, prompts, limit=limit)
    assert [row.tokens for row in rows] == want


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_keep_a_path_is_refused(name):
    with pytest.raises(AccelError, match=REFUSED[name]):
        built("llama", tables=CASES[name] | RECYCLING)


@pytest.mark.long
@pytest.mark.parametrize("context", [64, 48])
@pytest.mark.parametrize(
    "tree", [EagleTree(depth=3), Dyspec(threshold=0.0)], ids=["eagle", "dyspec"]
)
def test_a_draft_models_trees_end_at_its_context(tree, context):
    """Which expands more nodes than a tree may have, or than have room."""
    model = built("llama", tables=RECYCLING)
    for sampler in (Standard(), Standard(temperature=0.8)):
        ends = {"max_context": 64, "limit": 99}
        prompts = texts(50, 2, 0, 45)
        want = plain(model.session(2), rows_of(prompts, sampler, **ends))
        rows = rows_of(prompts, sampler, **ends)

        def session(batch=1):
            opened = model.session(batch)
            opened._core.max_context = context
            return opened

        beside = SimpleNamespace(session=session, tokenizer=None, facts=model.facts)
        own = SimpleNamespace(draft_model=beside, tokenizer=None, facts=model.facts)
        with model.session(2) as target:
            drafter = Model()
            list(speculated(target, rows, drafter, "sample-match", 31, model=own, tree=tree))
        assert [(row.tokens, row.finish) for row in rows] == [(w, "context") for w in want]
        assert all(row.drafting["accepted"] > 0 for row in rows)


@pytest.mark.long
def test_a_chain_asks_for_no_trees():
    tables = RECYCLING | {"tree": {"use": "chain"}}
    model = built("llama", tables=tables)
    assert not model.session().capabilities.trees
    prompts = texts(50, 2, 2, 30)
    rows, _ = recycled(model, prompts, assemble(Recipe(tables=tables)).methods["tree"])
    assert [row.tokens for row in rows] == plain(model.session(2), rows_of(prompts, max_context=64))


def test_sampled_tokens_are_those_of_the_same_numbers():
    model, sampler = built("llama", tables=RECYCLING), Standard(temperature=0.8, top_p=0.9)
    prompts = texts(50, 3, 3, 30)
    want = plain(model.session(3), rows_of(prompts, sampler, seed=4, max_context=64))
    rows, _ = recycled(model, prompts, sampler=sampler, seed=4)
    assert [row.tokens for row in rows] == want


def drawing(law, vocabulary, shape, honest):
    """A drafter that draws trees from odds of its own over what the target may say."""
    q = np.zeros(vocabulary)
    possible = sorted({token for past in law for token in past})
    q[possible] = np.random.default_rng(1).exponential(size=len(possible))
    rng = np.random.default_rng(2)

    def says(seen, limit):
        whole = Distribution(np.arange(vocabulary), q / q.sum())
        draw = Chance(rng).draw if honest else lambda left: int(left.tokens[left.weights.argmax()])
        return grown({0: shape.begin().grow(limit, draw)}, Asked(lambda prefix: whole))[0]

    return Says(says)


def odds(rule, shape, honest=True, count=60):
    """See `surprise`."""
    model = built("llama", tables=RECYCLING)
    vocabulary = model.facts.vocab_size

    def oracle(seen):
        return model.logits([seen.tolist()])[0]

    toy = SimpleNamespace(
        session=lambda batch: model.session(batch), oracle=oracle, vocab=vocabulary
    )
    return surprise(
        toy, rule, lambda law: drawing(law, vocabulary, shape, honest), count, tokens=4, tree=shape
    )


@pytest.mark.long
@pytest.mark.parametrize(
    "shape", [Static([[0], [1], [0, 0], [0, 1]]), Dyspec()], ids=["static", "dyspec"]
)
def test_drawn_trees_leave_the_odds_of_the_target(shape):
    assert odds("rrs-wor", shape) < 4


@pytest.mark.long
def test_a_tree_that_was_not_drawn_as_it_says_is_caught():
    assert odds("rrs-wor", Static([[0], [1], [0, 0], [0, 1]]), honest=False) > 6


def test_recipes_of_trees_name_what_goes_with_them():
    for tables, words in [
        (
            {"tree": {"use": "static"}},
            "tree sets the shape of drafts, but the recipe has no .draft.",
        ),
        (RECYCLING | {"kv.select": {"use": "quest"}}, "cannot be combined with"),
    ]:
        with pytest.raises(RecipeError, match=words):
            assemble(Recipe(tables=tables))
