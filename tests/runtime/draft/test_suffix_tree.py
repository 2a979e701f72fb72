"""SuffixDecoding: drafts against counting every continuation by hand, and a store kept with a model."""

import numpy as np
import pytest

from accel.compiler.assemble import assemble
from accel.ir.errors import RecipeError
from accel.ir.recipe import Recipe
from accel.runtime.decode.costs import Costs
from accel.runtime.draft import suffix_tree
from accel.runtime.draft.suffix_tree import SuffixTree
from accel.runtime.model.compiled import CompiledModel
from accel.runtime.speculation.texts import GAP, TextStore, matches

from ...prefill_case import built


def occurrences(text, pattern):
    size = len(pattern)
    return sum(text[i : i + size] == pattern for i in range(len(text) - size + 1))


def latest(text, pattern):
    size = len(pattern)
    return max((i for i in range(len(text)) if text[i : i + size] == pattern), default=-1)


def by_hand(of, text, tail, limit):
    """The largest score of a draft over all match lengths, each draft by counting in lists."""
    best = 0.0
    for size in range(1, len(tail) + 1):
        pattern = tail[-size:]
        if not (whole := occurrences(text, pattern)):
            break
        open_, score, most = [([], 1.0)], 0.0, min(limit, int(of.alpha * size + of.offset + 1e-6))
        for taken in range(most + 1):
            path, chance = max(open_, key=lambda one: one[1])
            open_.remove((path, chance))
            score += chance if taken else 0
            after = [
                (occurrences(text, [*pattern, *path, t]), latest(text, [*pattern, *path, t]), t)
                for t in set(text) - {GAP}
            ]
            after = [([*path, t], n / whole) for n, _, t in sorted(after)[::-1]]
            after = [one for one in after if one[1] >= of.min_prob]
            open_ += after if of.tree else after[:1]
            if not open_:
                break
        best = max(best, score)
    return best


def law(of, texts=30):
    """Scores are those by hand, and a draft is as likely as it says: every token has its count."""
    rng, drafted = np.random.default_rng(0), 0
    for _ in range(texts):
        text = rng.integers(0, 3, 40)
        text[rng.random(40) < 0.05] = GAP
        tail = rng.integers(0, 3, 9)
        for searched in (text, tail):  # a store's, and the request's own, which ends with the tail
            limit = int(rng.integers(1, 8))
            best = suffix_tree._best(of, searched, tail, limit)
            assert best.score == pytest.approx(by_hand(of, searched.tolist(), tail.tolist(), limit))
            assert len(best.tokens) <= min(limit, of.alpha * tail.size + of.offset)
            chances = {-1: 1.0}
            for node, parent in enumerate(best.parents):
                path, up = [best.tokens[node]], parent
                while up >= 0:
                    path.insert(0, best.tokens[up])
                    up = best.parents[up]
                chances[node] = max(
                    occurrences(searched.tolist(), [*tail[-m:].tolist(), *path])
                    / max(1, occurrences(searched.tolist(), tail[-m:].tolist()))
                    for m in range(1, tail.size + 1)
                )
                assert chances[node] >= of.min_prob
            drafted += len(best.tokens)
    assert drafted


@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("more", [{}, {"alpha": 2.0, "offset": 1.0, "min_prob": 0.3}])
def test_drafts_are_those_by_hand(tree, more):
    law(SuffixTree(tree=tree, **more), texts=12)


def test_the_least_frequent_is_caught(monkeypatch):
    followers = suffix_tree._followers

    def least(text, ends, first):
        yield from sorted(followers(text, ends, False), key=lambda one: one[1].size)[
            : 1 if first else 9
        ]

    monkeypatch.setattr(suffix_tree, "_followers", least)
    with pytest.raises(AssertionError):
        law(SuffixTree())


def test_long_matches_of_many_places():
    """More places than are compared at once, against comparing each."""
    text = np.tile([1, 2, 3, 1, 2, 4], 300)
    ends, lengths = matches(text, text[-40:])
    for end, length in list(zip(ends, lengths, strict=True))[::17]:
        alike = [text[end - 1 - i] == text[-1 - i] if end > i else False for i in range(40)]
        assert length == [*alike, False].index(False)


def test_the_oldest_texts_are_given_up():
    store, text = TextStore(4 * 100), np.arange(30)
    first = store.tokens
    for n in range(20):
        store.add(text + 100 * n)
        assert store.bytes <= 400 and store.tokens.size >= min(31 * (n + 1), 50)
        assert store.tokens[-30:].tolist() == (text + 100 * n).tolist() and store.tokens[0] == GAP
    assert not first.size, "a view stays as it was"
    store.add(np.arange(500))
    assert store.tokens.tolist() == [GAP, *range(401, 500)]


@pytest.mark.long
def test_a_model_keeps_it_between_requests():
    """The second of two like requests takes fewer calls; of another model of the same weights it does not."""
    tables = {"draft": {"use": "suffix-tree", "shared": True}, "verify": {"use": "sample-match"}}
    tables["loop"] = {"use": "speculative"}
    prompt, base, want = np.random.default_rng(0).integers(3, 50, 20), built("llama"), {}
    for sampling in ({}, {"temperature": 1.0, "seed": 3}):
        want = base.generate(prompt, max_new_tokens=24, eos=[], **sampling).tokens
        for _ in range(2):
            model = CompiledModel(base._sessions.backend, base.facts, recipe={"tables": tables})
            model._costs = Costs((1, 32), (1.0, 1.1))
            outs = [model.generate(prompt, 24, eos=[], **sampling) for _ in range(2)]
            assert [out.tokens for out in outs] == [want, want]
            first, second = (out.stats["speculation"]["accepted"] for out in outs)
            assert second > first + 6


def test_what_it_takes_and_goes_with():
    plan = assemble(Recipe(tables={"draft": {"use": "suffix-tree", "tree": True}}))
    assert plan.recipe.tables["verify"]["use"] == "rrs-wor", "a rule that takes trees"
    for options, words in [
        ({"alpha": -1.0}, "alpha is -1.0; give at least 0"),
        ({"alpha": float("inf")}, "alpha is inf"),
        ({"offset": float("nan")}, "offset is nan; give a finite number"),
        ({"depth": 0}, "depth is 0; give 1 to 1024"),
        ({"min_prob": 0.0}, "min_prob is 0.0; give more than 0"),
    ]:
        with pytest.raises(RecipeError, match=words):
            SuffixTree(**options)


@pytest.mark.parametrize("count", [1, 2, 40], ids=["one place", "two places", "many places"])
def test_a_text_shorter_than_what_is_looked_for(count):
    """A store of one short answer, beside a long request."""
    text, tail = np.full(count, 7), np.full(64, 7)
    ends, lengths = matches(text, tail)
    assert ends.tolist() == lengths.tolist() == list(range(1, count + 1))
