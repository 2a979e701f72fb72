"""What every shape of a draft holds to: its limit, what was given to it, and that a rule over its trees stays exact."""

import itertools
from dataclasses import dataclass, replace

import numpy as np
import pytest

from accel.ir.invariants import Invariant
from accel.runtime.sample import Distribution
from accel.runtime.sample.standard import Standard
from accel.runtime.tree import LEVEL, Base, Level, Shape, Siblings
from accel.runtime.tree._nodes import Nodes, children
from accel.runtime.verify import Chance

from ..grow_case import AXIS, Asked, Grown, prefixes, ranked, table, tree_of
from ..verify_case import AXIS as RULES
from ..verify_case import gap, sampled

NAMES = AXIS.names()
LIMITS = (0, 1, 2, 3, 7, 20)
SIZE = 6
WORLDS = [
    (sampled(), "other"),
    (sampled(top_k=2), "holes"),
    (sampled(), "sure"),
    (Standard(), "other"),
]


def luck(seed=0):
    return Chance(np.random.default_rng(seed)).draw


def law_form(method):
    """No more nodes than were asked for, every one of them out of what was given, and drawn or chosen as asked."""
    biggest = 0
    for seed, limit, draw in [(s, n, d) for s in range(3) for n in LIMITS for d in (None, luck(s))]:
        says = table(SIZE, seed, zeros=seed > 0)
        tree = tree_of(method.begin(), limit, Asked(says), draw)
        assert len(tree) <= limit and (method.branches or tree.branch is None)
        for node, before in enumerate(prefixes(tree)):
            law, earlier = (
                says(before),
                [s for s in tree.children(int(tree.parents[node])) if s < node],
            )
            assert law.of(int(tree.tokens[node])) > 0, "it cannot come"
            if draw is None or method.siblings is Siblings.CHOSEN:
                order = ranked(says, SIZE)(before)
                assert tree.tokens[node] == order[len(earlier)], (
                    "children are the likeliest, in that order"
                )
                assert tree.q is None
            else:
                want = law.dense(SIZE)
                if method.siblings is Siblings.APART:
                    want *= ~np.isin(np.arange(SIZE), tree.tokens[earlier])
                np.testing.assert_allclose(tree.law(node).dense(SIZE), want / want.sum(), atol=1e-6)
        biggest = max(biggest, len(tree))
    assert biggest > 2, "it hardly grows"


def law_cut(method):
    """Where guesses end, it gives what it has: a part of the tree that it would have grown."""
    for levels in range(4):
        says = table(SIZE, 5)
        tree = tree_of(method.begin(), 9, Asked(says, levels=levels))
        assert max(tree.depths, default=0) <= levels
        whole = tree_of(method.begin(), 9, Asked(says))
        assert levels == 0 or len(tree) >= min(1, len(whole))


def law_ends(method):
    """Nothing hangs on a node after which nothing follows, be it the root."""
    for draw in (None, luck(3)):
        says = table(SIZE, 5)
        ends = tree_of(method.begin(), 9, Asked(says)).tokens[:1].tolist()
        stopped = Asked(lambda before, says=says: None if len(before) == 1 else says(before))
        assert max(tree_of(method.begin(), 9, stopped, draw).depths) == 1
        some = Asked(lambda p, says=says, ends=ends: None if list(p[:1]) == ends else says(p))
        tree = tree_of(method.begin(), 9, some, draw)
        assert all(list(before[:1]) != ends for before in prefixes(tree))
        assert not len(tree_of(method.begin(), 9, Asked(lambda before: None), draw))


def law_ranks(method):
    """Of tokens in order only it grows a tree of those, and none where there are none."""
    for limit in LIMITS:
        says = ranked(table(SIZE, limit, zeros=True), 4)
        tree = tree_of(method.begin(), limit, Asked(says))
        assert len(tree) <= limit and tree.q is None
        for node, before in enumerate(prefixes(tree)):
            place = list(tree.children(int(tree.parents[node]))).index(node)
            assert tree.tokens[node] == says(before)[place]
        assert not len(tree_of(method.begin(), limit, Asked(lambda before: [-1, -1])))


def law_exact(method):
    """Rules stay exact over its trees: the joint law of the tokens is the target's own."""
    rules = [RULES.build(n) for n in RULES.names()]
    fit = [r for r in rules if r.grade != "approximate" and not r.relies & method.breaks]
    assert fit, "no rule takes it"
    for rule in fit:
        for sampler, draft in WORLDS:
            world = Grown(sampler, draft, shape=method, limit=3)
            assert gap(rule, world, (), 2) < 1e-12, (rule, draft)


def test_no_shape_asks_for_a_guess_where_no_node_is_wanted():
    """The control: one node is asked for."""
    for name, draw in itertools.product(NAMES, (None, luck())):
        with pytest.raises(StopIteration):
            next(AXIS.build(name).begin().grow(0, draw))
        assert next(AXIS.build(name).begin().grow(1, draw)) is LEVEL


@pytest.mark.parametrize("law", [law_form, law_cut, law_ends, law_exact])
@pytest.mark.parametrize("name", NAMES)
def test_every_shape(name, law):
    law(AXIS.build(name))


@pytest.mark.parametrize(
    "name", [n for n in NAMES if Invariant.PROBABILITIES not in AXIS.build(n).relies]
)
def test_every_shape_that_takes_ranks(name):
    law_ranks(AXIS.build(name))


# What the laws catch: two children for each node, with one thing wrong


@dataclass(frozen=True)
class Twos(Base, Shape):
    wrong: str = ""
    siblings: Siblings = Siblings.APART

    def begin(self, cost=None, level=0.0):
        return self

    def grow(self, limit, draw=None):
        again = self.siblings is Siblings.INDEPENDENT
        draw = None if self.siblings is Siblings.CHOSEN else draw
        nodes, level, open_, expanded = Nodes(again or self.wrong == "says again"), LEVEL, [-1], 0
        drawn = 0
        while open_ and drawn < limit:
            guesses = yield level
            if guesses is None:
                break
            added, parents = [], []
            for number, (node, guess) in enumerate(zip(open_, guesses, strict=True)):
                room = 2 if self.wrong == "limit" else min(2, limit - drawn)
                new = self.children(nodes, node, guess, room, draw)
                drawn += len(new)
                new = list(dict.fromkeys(new))  # one of those that hold the same token
                added, parents = added + new, parents + [expanded + number] * len(new)
            expanded += len(open_)
            open_ = added
            tokens = np.array([nodes.tokens[n] for n in added], np.int64)
            level = Level(
                tokens, np.array(parents if self.wrong != "numbers" else [n + 9 for n in parents])
            )
        tree = nodes.tree()
        return replace(tree, draws=None) if self.wrong == "forgets" else tree

    def children(self, nodes, node, guess, room, draw):
        if guess is None:
            return list(nodes.add(node, [5] if self.wrong == "goes on" else []))
        if isinstance(guess, np.ndarray):
            found = [t for t in guess.tolist() if t >= 0]
            return list(
                nodes.add(node, found[::-1][:room] if self.wrong == "order" else found[:room])
            )
        if self.wrong == "zeros":
            guess = Distribution(guess.tokens, np.ones(len(guess.tokens)))
        if self.wrong == "argmax":  # chosen, and told as drawn
            return list(nodes.add(node, children(guess, room, None), guess))
        found = children(guess, room, draw, self.siblings is Siblings.INDEPENDENT)
        if (
            self.wrong == "drops" and found and guess.of(found[-1]) < 0.4
        ):  # after it was drawn, by what it is
            found.pop()
        return list(nodes.add(node, found, None if draw is None else guess))


@pytest.mark.parametrize("siblings", Siblings)
def test_twos_hold(siblings):
    """Drawn either way, and never; the laws reach each."""
    for law in (law_form, law_cut, law_ends, law_exact, law_ranks):
        law(Twos(siblings=siblings))


@pytest.mark.parametrize(
    ("wrong", "law"),
    [
        ("limit", law_form),
        ("zeros", law_form),
        ("numbers", law_form),
        ("order", law_ranks),
        ("drops", law_exact),
        ("argmax", law_exact),
        ("says again", law_exact),
        ("goes on", law_ends),
    ],
)
def test_the_laws_catch(wrong, law):
    with pytest.raises(AssertionError):
        law(Twos(wrong))


def test_how_often_a_token_was_drawn_is_caught():
    """Of siblings that are merged where they agree."""
    with pytest.raises(AssertionError):
        law_exact(Twos("forgets", Siblings.INDEPENDENT))
