"""mcsd-improved: a tree that ends after a level is a slice of the whole one, and what decides that it ends."""

import numpy as np
import pytest

from accel.compiler.assemble import assemble
from accel.ir.errors import RecipeError
from accel.ir.recipe import Recipe
from accel.runtime.length.mcsd_improved import McsdImproved
from accel.runtime.sample import Distribution
from accel.runtime.speculation.round_cost import unmeasured_cost
from accel.runtime.tree import Level, without
from accel.runtime.tree.static import Static

from ...grow_case import Asked, prefixes, table, tree_of
from ...length_case import by_the_first
from ...verify_case import World, distance, outcomes, sampled

SIZE = 7


def test_a_tree_that_ends_after_a_level_is_a_slice_of_the_whole():
    """Its nodes and its mask, of chosen children; and as many as the widths say."""
    for widths in ([4, 2, 2], [3, 2, 1, 1, 1], [1, 3]):
        shape, says = Static(widths=widths), table(SIZE, 1)
        whole = tree_of(shape.begin(), 99, Asked(says))
        counts = np.cumsum(np.cumprod(widths))
        assert len(whole) == counts[-1] and max(whole.depths) == len(widths)
        for level, count in enumerate(counts, 1):
            part = tree_of(shape.begin(), 99, Asked(says, levels=level))
            assert part.tokens.tolist() == whole.tokens[:count].tolist()
            np.testing.assert_array_equal(part.mask, whole.mask[: count + 1, : count + 1])
        dyadic = tree_of(Static(paths=[list(p) for p in shape.paths]).begin(), 99, Asked(says))
        assert dyadic.tokens.tolist() == whole.tokens.tolist()


def levels(tree, says):
    """What a length is told of a tree: each level but the last, and the logits that it came by."""
    deep, number = int(max(tree.depths)), {-1: 0}
    logits = np.log(np.maximum([says(p).dense(SIZE) for p in prefixes(tree)], 1e-9))
    for depth in range(1, deep):
        nodes = np.flatnonzero(tree.depths == depth)
        yield (
            Level(tree.tokens[nodes], np.array([number[int(tree.parents[n])] for n in nodes])),
            logits[nodes],
        )
        number |= {int(n): len(number) + i for i, n in enumerate(nodes)}


def test_it_reads_the_likeliest_path_to_a_level():
    says = table(SIZE, 2)
    tree, reader = (
        tree_of(Static(widths=[3, 2, 2, 1]).begin(), 99, Asked(says)),
        McsdImproved().reader(),
    )
    for depth, (level, logits) in enumerate(levels(tree, says), 1):
        x = reader.read(level, logits)
        paths = []
        for node in np.flatnonzero(tree.depths == depth):
            path = tree.tokens[list(tree.path(int(node)))].tolist()
            laws = [says(tuple(path[:n])) for n in range(depth)]
            paths.append(np.prod([law.of(token) for law, token in zip(laws, path, strict=True)]))
        assert np.exp(x[0]) == pytest.approx(max(paths), rel=1e-4)
        assert np.exp(x[1]) == pytest.approx(sum(paths), rel=1e-4)
        assert x[-1] == depth / 8 and x.shape == (McsdImproved.width(),)


def test_a_decision_is_made_after_each_level(monkeypatch):
    """By how likely the likeliest path is: more levels with a lower threshold; 0 never ends a tree, more than 1 ends
    each after one level.
    """
    monkeypatch.setattr(McsdImproved, "part", property(by_the_first))
    says, found = table(SIZE, 2), []
    tree = tree_of(Static(widths=[3, 2, 1, 1, 1]).begin(), 99, Asked(says))
    told = list(levels(tree, says))
    for threshold in (0, 0.05, 0.2, 0.4, 1.01):
        pace, depth = McsdImproved(threshold).begin(unmeasured_cost), 1
        for level, logits in told:
            if not pace.more(level, logits):
                break
            depth += 1
        found.append(depth)
    assert found[0] == 5 and found[-1] == 1 and found == sorted(found, reverse=True)
    assert len(set(found)) > 3


def test_what_it_learns_is_whether_the_next_level_stands():
    for level in (1, 2, 3):
        assert [McsdImproved.label(level, accepted) for accepted in range(5)] == [
            accepted > level for accepted in range(5)
        ]


def test_the_recipe_and_what_it_refuses():
    plan = assemble(Recipe.load("mcsd-improved"))
    assert plan.grade == "distribution-exact" and plan.methods["length"] == McsdImproved()
    assert plan.methods["tree"].widths == tuple(McsdImproved.drafts["tree"]["widths"])
    assert len(plan.methods["tree"].paths) <= McsdImproved().most
    for options, words in (({"widths": [2], "paths": [[0]]}, "paths and widths are both given"),
                           ({"widths": []}, "widths are \\[\\]; give the children"),
                           ({"widths": [30, 30]}, "widths .* make more than 512 nodes")):  # fmt: skip
        with pytest.raises(RecipeError, match=f"tree.static: {words}"):
            Static(**options)
    with pytest.raises(RecipeError, match="length.mcsd-improved: threshold is -1"):
        McsdImproved(-1.0)
    tables = {**Recipe.load("mcsd-improved").tables, "draft": {"use": "token-recycling"}}
    with pytest.raises(
        RecipeError, match="length = mcsd-improved cannot be combined with draft = token-recycling"
    ):
        assemble(Recipe(tables=tables))


def initialised(world, roots, chance):
    """A round whose first tokens are so many of the target's, each with a drafted one below it; the first of which the
    drafted one stands is kept.
    """
    seen, tried, kept = (0, 1), [], []
    for _ in range(roots):
        root = chance.draw(without(world.law(seen), np.array(tried, np.int64)))
        tried.append(root)
        law, q = world.law((*seen, root)), world.q((*seen, root))
        token = chance.draw(Distribution(np.arange(world.size), q))
        stands = chance.accept(law.of(token) / q[token])
        if not stands:
            rest = np.maximum(law.dense(world.size) - q, 0)
            token = chance.draw(Distribution(np.arange(world.size), rest))
        kept.append((stands, root, token))
    return max(kept, key=lambda one: one[0])[1:]


def test_first_tokens_of_the_target_are_one_or_the_distribution_changes():
    """Why a draft has one root, the token that the target chose, greedy or not: of two the better one is kept."""
    world = World(sampled(), "other")

    def plain(chance):
        first = chance.draw(world.law((0, 1)))
        return first, chance.draw(world.law((0, 1, first)))

    want = outcomes(plain)
    gaps = [distance(outcomes(lambda c, n=n: initialised(world, n, c)), want) for n in (1, 2)]
    assert gaps[0] < 1e-6 and gaps[1] > 0.02, gaps
