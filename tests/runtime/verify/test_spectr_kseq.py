"""K-SEQ: how much is accepted of what could be, its threshold, chains that go on together, and what it takes."""

import itertools
import math
from dataclasses import dataclass

import numpy as np
import pytest

from accel.compiler.assemble import assemble
from accel.ir.errors import RecipeError
from accel.ir.recipe import Recipe
from accel.runtime.tree.independent_chains import IndependentChains
from accel.runtime.tree.specinfer_tree import SpecinferTree
from accel.runtime.verify.spectr_kseq import SpectrKseq, left

from ...grow_case import Asked, prefixes, table, tree_of
from ...test_verify import Fixed, accepted
from ...verify_case import World, gap, sampled

CHAINS = (-1, -1, 0, 1)  # two of two tokens


def laws(count, seed=0):
    """Pairs of p and q of 2 to 4 tokens, some of which have none."""
    rng = np.random.default_rng(seed)
    for turn in range(count):
        size = 2 + turn % 3
        pair = rng.dirichlet(np.full(size, 0.6), 2)
        if turn % 4 == 3:
            pair[turn % 2, turn % size] = 0
        yield pair / pair.sum(1, keepdims=True)


def optimum(p, q, count):
    """The most that any rule accepts of so many independent draws: the smallest cut between the draws and the tokens
    that they may become, which is the transport programme's dual (Hall).
    """
    sets = itertools.product((0.0, 1.0), repeat=len(p))
    return min(float(p @ s + 1 - (q @ s) ** count) for s in map(np.array, sets))


@dataclass(frozen=True)
class Threshold(SpectrKseq):
    """With another threshold: `at` 0: as many as there are draws; 1: as for a single one, which is too little."""

    at: int = 0

    def threshold(self, p, q, count):
        return float(self.at or count)


@pytest.mark.parametrize("count", [2, 3])
def test_it_accepts_at_least_a_share_of_the_optimum(count):
    """The tests alone do; what is drawn after them may be a sibling, too, and never makes it more than the optimum."""
    gains = []
    for p, q in laws(9):
        best, scale = optimum(p, q, count), SpectrKseq().threshold(p, q, count)
        tested, loose = (1 - (1 - np.minimum(q, p / at).sum()) ** count for at in (scale, count))
        found = accepted(SpectrKseq(), Fixed(p, q, again=True), (-1,) * count)
        assert (1 - 1 / math.e) * best <= tested + 1e-9 and loose <= tested + 1e-9
        assert tested - 1e-6 <= found <= best + 1e-6
        gains.append(tested - loose)
    assert max(gains) > 0.02


def test_the_threshold_is_the_smallest_that_leaves_a_distribution():
    below = 0
    for p, q in laws(30, 1):
        for count in (1, 2, 5):
            scale = SpectrKseq().threshold(p, q, count)
            share = 1 - (1 - np.minimum(q, p / scale).sum()) ** count
            owed = left(p, q, scale, count)
            assert 1 <= scale <= count and (count > 1 or scale == 1)
            assert owed.sum() == pytest.approx(1 - share, abs=1e-9)
            if scale > 1.001:
                below += left(p, q, scale * 0.99, count).sum() > 1 - share + 1e-6
    assert below > 10, "a smaller one would take from a token more than its due"


def test_chains_that_agree_go_on_together():
    world = World(sampled(), "other", size=2, replacement=True)
    assert gap(SpectrKseq(), world, CHAINS) < 1e-12
    assert gap(Threshold(), world, CHAINS) < 1e-12, "any threshold above is exact, too"
    worlds = [World(sampled(), "other", seed, 2, True) for seed in range(4)]
    assert max(gap(Threshold(at=1), world, CHAINS, 2) for world in worlds) > 0.01


def test_chains_are_of_one_length_and_a_trie_of_what_they_share():
    says = table(3, 2)
    luck = np.random.default_rng(0)
    tree = tree_of(IndependentChains(), 11, Asked(says), lambda law: law.draw(luck))
    assert tree.replacement and np.bincount(tree.depths[tree.draws])[1:].tolist() == [3, 3, 3]
    whole = [(*p, t) for p, t in zip(prefixes(tree), tree.tokens.tolist(), strict=True)]
    assert len(set(whole)) == len(tree) < 9, "some agree, and stand once"
    below = [len(tree.children(node)) for node in range(len(tree)) if tree.depths[node] < 3]
    drawn = np.bincount(tree.draws)[tree.depths < 3]
    assert below == drawn.tolist() and max(drawn) > 1, "as many chains go on as came there"
    assert len(tree_of(IndependentChains(), 2, Asked(says))) == 2
    chosen = tree_of(IndependentChains(2), 4, Asked(says))
    assert sorted(chosen.tokens[:2].tolist()) == sorted(np.argsort(-says(()).weights)[:2].tolist())


def test_widths():
    tree = tree_of(SpecinferTree((1, 3, 2)), 99, Asked(table(6, 0)))
    assert np.bincount(tree.depths)[1:].tolist() == [1, 3, 6]
    assert len(tree_of(SpecinferTree((1, 3, 2)), 5, Asked(table(6, 0)))) == 5


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        (
            {"tree": {"use": "sequoia"}, "verify": {"use": "spectr-kseq"}},
            "verify = spectr-kseq cannot be combined with tree = sequoia: .* drawn independently of each other, or "
            "chosen; leave one of the two out .the nearest recipe that works: ",
        ),
        ({"tree": {"use": "independent-chains", "chains": 0}}, "chains is 0; give 1 to 64"),
        ({"tree": {"use": "specinfer-tree", "widths": [1, 0]}}, r"widths are \[1, 0\]; give the"),
        ({"tree": {"use": "specinfer-tree", "widths": [9] * 9}}, "make more than 512 nodes"),
        ({"tree": {"use": "specinfer-tree", "widths": "13"}}, "widths are '13'"),
    ],
)
def test_what_does_not_fit(tables, words):
    with pytest.raises(RecipeError, match=words):
        assemble(Recipe("mine", tables={"draft": {"use": "model"}, **tables}))
