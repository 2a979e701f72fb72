"""The dynamic tree of EAGLE-2: its nodes are the likeliest of those found, and what it may not be judged by."""

import dataclasses
import itertools

import numpy as np
import pytest

from accel.ir.errors import RecipeError
from accel.runtime.tree.chain import Chain
from accel.runtime.tree.eagle_tree import EagleTree

from ...grow_case import AXIS, Asked, Grown, prefixes, table, tree_of
from ...verify_case import AXIS as RULES
from ...verify_case import gap, sampled

SIZE = 6


def likelihoods(tree, says):
    """The probability of each node's path."""
    return [
        float(np.prod([says(path[:i]).of(path[i]) for i in range(len(path))]))
        for path in ((*b, int(t)) for b, t in zip(prefixes(tree), tree.tokens, strict=True))
    ]


def looked_at(says, top_k, depth):
    """The likelihoods of all nodes that are ever found, level by level."""
    pool, open_ = [], [((), 1.0)]
    for _ in range(depth + 1):
        new = []
        for path, above in open_:
            odds = says(path).dense(SIZE)
            new += [((*path, t), above * odds[t]) for t in np.argsort(-odds)[:top_k].tolist()]
        pool += [likely for _, likely in new]
        open_ = sorted(new, key=lambda one: -one[1])[:top_k]
    return sorted(pool, reverse=True)


@pytest.mark.parametrize("seed", range(2))
def test_nodes_are_the_likeliest_of_those_found(seed):
    says = table(SIZE, seed)
    for top_k, depth, nodes in itertools.product((1, 2, 3), (0, 2), (3, 9)):
        tree = tree_of(EagleTree(nodes, top_k, depth), 50, Asked(says))
        want = looked_at(says, top_k, depth)[:nodes]
        assert len(tree) == min(nodes, top_k + depth * top_k**2 if top_k > 1 else depth + 1)
        np.testing.assert_allclose(sorted(likelihoods(tree, says), reverse=True), want, rtol=1e-6)


def test_one_child_makes_a_chain_and_equals_keep_their_parents():
    chain, says = tree_of(Chain(), 4, Asked(table(SIZE, 3))), table(SIZE, 3)
    tree = tree_of(EagleTree(top_k=1, depth=3), 9, Asked(says))
    assert tree.branch is None and tree.tokens.tolist() == chain.tokens.tolist()

    def sure(before):
        law = says(before)
        return dataclasses.replace(law, weights=(law.weights == law.weights.max()) * 1.0)

    tree = tree_of(EagleTree(nodes=3), 9, Asked(sure))
    assert tree.depths.tolist() == [1, 2, 3], "all equally likely"


class Judged(EagleTree):
    """Its tokens are told as drawn from the drafter's distribution, so that p / q judges them."""

    def grow(self, limit, draw=None):
        grows, reply, before, said = super().grow(limit, draw), None, [], {}
        while True:
            try:
                level = grows.send(reply)
            except StopIteration as end:
                tree = end.value
                break
            pairs = zip(level.tokens.tolist(), level.parents.tolist(), strict=True)
            new = [(*before[p], t) for t, p in pairs] if before else [()]
            before += new
            reply = yield level
            said |= dict(zip(new, reply, strict=True))
        q = np.array([said[path].dense(3) for path in prefixes(tree)])
        return dataclasses.replace(tree, q=q, rows=np.arange(len(tree)))


def test_it_is_not_to_be_judged_by_what_the_drafter_says():
    for shape, exact in ((EagleTree(), True), (Judged(), False)):
        found = gap(RULES.build("rrs-wor"), Grown(sampled(), "other", shape=shape, limit=3), (), 2)
        assert found < 1e-12 if exact else found > 0.1


@pytest.mark.parametrize("options", [{"nodes": 0}, {"top_k": 0}, {"depth": -1}, {"nodes": 999}])
def test_options(options):
    (name,) = options
    with pytest.raises(
        RecipeError, match=rf"eagle-tree.{name}.*{options[name]}|{name} is {options[name]}"
    ):
        AXIS.build("eagle-tree", **options)
