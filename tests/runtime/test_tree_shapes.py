"""What each shape of a draft is beyond the laws: its form, and that it is the best one, by trying all."""

import itertools
from functools import cache

import numpy as np
import pytest

from accel.ir.errors import RecipeError
from accel.runtime.decode.costs import Costs
from accel.runtime.sample import Distribution
from accel.runtime.speculation.guard import round_costs
from accel.runtime.tree import ROOT, Tree, grown
from accel.runtime.tree._nodes import likeliest, top
from accel.runtime.tree._optimal import Optimal
from accel.runtime.tree._shaped import chances, formed, likely
from accel.runtime.tree.chain import Chain
from accel.runtime.tree.dyspec import Dyspec
from accel.runtime.tree.sequoia import NODES, Sequoia
from accel.runtime.tree.static import RATES as USUAL
from accel.runtime.tree.static import Static

from ..grow_case import Asked, prefixes, ranked, table, tree_of

RATES = [(0.6, 0.2, 0.1), (0.3, 0.3, 0.3), (0.05, 0.8, 0.1), (0.1, 0.0, 0.7)]


def ranks(tree):
    """The paths of a tree's nodes by rank, in order."""
    rank = [list(tree.children(int(p))).index(n) for n, p in enumerate(tree.parents)]
    return [tuple(rank[n] for n in tree.path(node)) for node in range(len(tree))]


def full(shape, limit, width=8):
    """The form that a shape grows where every token has followers."""
    return ranks(tree_of(shape, limit, Asked(lambda prefix: list(range(width)))))


def test_a_chain_is_the_likeliest_after_the_likeliest():
    says, want = table(6, 1), []
    tree = tree_of(Chain(), 5, Asked(says))
    for _ in range(5):
        want.append(int(says(tuple(want)).weights.argmax()))
    assert tree.tokens.tolist() == want and tree.branch is None


def test_rows_grow_together_in_as_many_calls_as_the_deepest_takes():
    asked, calls = [Asked(table(6, row)) for row in range(3)], []
    shapes = [Chain(), Static().begin(), Chain()]

    def expand(rows):
        calls.append(sorted(rows))
        return {row: asked[row]({0: level})[0] for row, level in rows.items()}

    trees = grown({row: shape.grow(5 - row) for row, shape in enumerate(shapes)}, expand)
    for row, shape in enumerate(shapes):
        alone = tree_of(shape, 5 - row, Asked(table(6, row)))
        assert trees[row].tokens.tolist() == alone.tokens.tolist()
        assert trees[row].parents.tolist() == alone.parents.tolist()
    assert len(calls) == 5 and calls[0] == [0, 1, 2] and calls[-1] == [0]


def test_static_takes_the_first_of_its_paths():
    paths = [[0], [0, 0], [1], [0, 1], [0, 0, 0], [1, 0]]
    for limit in range(8):
        assert sorted(full(Static(paths).begin(), limit)) == sorted(map(tuple, paths[:limit]))
    default = full(Static().begin(), 80)
    assert len(default) == 80 and max(map(len, default)) == 6
    assert set(full(Static().begin(), 9)) < set(full(Static().begin(), 10)) < set(default)


@pytest.mark.parametrize(
    ("paths", "words"),
    [
        ([[0], [1, 0]], r"path \[1, 0\] lacks its parent \[1\]; put that before it"),
        ([[1], [0]], r"path \[1\] lacks its parent \[0\]"),
        ([[0], [0]], r"path \[0\] occurs twice"),
        ([[0], []], r"path \[\] is not a list of ranks"),
        ([0], "path 0 is not a list of ranks"),
        ([["a"]], "is not a list of ranks"),
        ("01", "path '01' is not a list of ranks; give paths as"),
        ([[-1]], "is not a list of ranks"),
    ],
)
def test_paths_that_make_no_tree(paths, words):
    with pytest.raises(RecipeError, match=words):
        Static(paths)


@cache
def forms(nodes, depth, width):
    """Every tree of so many nodes, as the trees below its children."""
    if nodes == 1:
        return [()]
    if not depth:
        return []
    found = []
    for count in range(1, width + 1):
        for sizes in itertools.product(range(1, nodes), repeat=count):
            if sum(sizes) == nodes - 1:
                found += itertools.product(*(forms(size, depth - 1, width) for size in sizes))
    return found


def worth(form, rates):
    """Tokens expected of it, the one after the last that stands included."""
    return 1 + sum(rate * worth(child, rates) for rate, child in zip(rates, form, strict=False))


def test_forms_are_all():
    assert [len(forms(n, 9, 9)) for n in range(1, 6)] == [1, 1, 2, 5, 14], "Catalan"


@pytest.mark.parametrize("rates", RATES)
def test_the_programme_finds_the_best_of_all_forms(rates):
    optimal = Optimal(rates, 7, 4)
    for nodes, depth in itertools.product(range(1, 8), range(5)):
        all_ = [worth(form, rates) for form in forms(nodes, depth, len(rates))]
        assert optimal.expected[depth, nodes] == (pytest.approx(max(all_)) if all_ else -np.inf)
        if all_:
            paths = optimal.paths(nodes, depth)
            assert len(set(paths)) == nodes - 1 and max(map(len, paths), default=0) <= depth
            assert 1 + sum(chances(paths, rates)) == pytest.approx(max(all_))
            formed(paths)


def test_growing_by_the_next_best_node_is_not_the_best():
    """What the comparison would catch; where no rank stands more often than the one before, it is."""
    lost = [
        Optimal(rates, 7, 4).expected[4, 7] - 1 - sum(chances(likely(rates, 6, 4), rates))
        for rates in RATES
    ]
    assert lost[0] == pytest.approx(0) and lost[1] == pytest.approx(0) and max(lost) > 0.05


def test_more_is_not_worse_and_one_rank_makes_a_chain():
    found = Optimal((0.5, 0.2), 20, 20).expected
    assert (np.diff(found[20, 1:]) >= 0).all() and (np.diff(found[:, 4][2:]) >= 0).all()
    chain = Optimal((0.7,), 9, 9).expected[9]
    np.testing.assert_allclose(chain[1:], [(1 - 0.7**m) / 0.3 for m in range(1, 10)])


def test_sequoia_goes_by_what_calls_cost():
    """As large as it may where calls cost alike; none too many where each token costs."""
    flat, steep = round_costs(None, 1), round_costs(Costs((1, 32), (1.0, 8.0)), 1)
    assert len(full(Sequoia().begin(flat), 20)) == len(full(Static().begin(flat), 20)) == 20
    small = full(Sequoia().begin(steep), 20)
    assert 1 <= len(small) < 10
    assert small == full(Static().begin(steep), 20), "rates as of static, until some are measured"
    assert len(full(Sequoia(rates=[0.9]).begin(steep), 20)) > len(small)
    gain = [Optimal(USUAL, 21, 8).expected[8, m] / (1 + 7 * (m - 1) / 31) for m in range(2, 22)]
    assert len(small) == 1 + int(np.argmax(gain))
    levels = [
        max(map(len, full(Sequoia().begin(flat, level), 20))) for level in (0.0, 0.1, 0.5, 5.0)
    ]
    assert levels == sorted(levels, reverse=True) and levels[-1] < levels[0], (
        "levels of a drafter cost too"
    )


def test_sequoia_learns_which_ranks_stand():
    """A target that takes the second child twice of three times, else none."""
    shape, rng = Sequoia().begin(), np.random.default_rng(0)
    for _ in range(200):
        tree = tree_of(shape, 6, Asked(lambda prefix: list(range(8))))
        path, node = [], ROOT
        while len(tree.children(node)) > 1 and rng.random() < 2 / 3:
            node = tree.children(node)[1]
            path.append(node)
        shape.observe(tree, path)
    assert full(shape, 4)[:2] == [(0,), (1,)] and (1, 1) in full(shape, 4)
    fixed = Sequoia(rates=[0.5, 0.1]).begin()
    before = full(fixed, 6)
    for _ in range(50):
        fixed.observe(Tree([0, 1], [-1, -1]), [1])
    assert full(fixed, 6) == before


@pytest.mark.parametrize("rates", [[], [0.0], [0.7, 0.6], [-0.1, 0.5], "0.5", 0.5, ["a"]])
def test_rates_that_are_none(rates):
    with pytest.raises(RecipeError, match="tree.sequoia: rates are"):
        Sequoia(rates=rates)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"threshold": 1.0}, "dyspec: threshold is 1.0"),
        ({"threshold": -0.1}, "dyspec: threshold"),
        ({"depth": 0}, "dyspec: depth is 0"),
        ({"temperature": 0.0}, "dyspec: temperature is 0.0"),
        ({"temperature": 1.5}, "dyspec: temperature is 1.5"),
    ],
)
def test_options_of_dyspec(options, words):
    with pytest.raises(RecipeError, match=words):
        Dyspec(**options)
    with pytest.raises(RecipeError, match="sequoia: depth is 0"):
        Sequoia(depth=0)


def products(says, depth, seen=()):
    """The product of probabilities on the path of every node down to a depth."""
    found = {}
    if depth:
        for token, p in enumerate(says(seen).probabilities):
            found[(*seen, token)] = p
            found |= {k: p * v for k, v in products(says, depth - 1, (*seen, token)).items()}
    return found


@pytest.mark.parametrize("limit", [1, 2, 4, 9])
def test_dyspec_keeps_the_nodes_of_largest_product(limit):
    for seed in range(12):
        says = table(4, seed, zeros=seed % 2 == 1)
        tree = tree_of(Dyspec(0.0, 4, 1.0), limit, Asked(says))
        every = products(says, 4)
        best = sorted((v for v in every.values() if v > 0), reverse=True)[:limit]
        got = [
            every[*before, token]
            for before, token in zip(prefixes(tree), tree.tokens.tolist(), strict=True)
        ]
        np.testing.assert_allclose(sorted(got, reverse=True), best)
        few = tree_of(Dyspec(0.1, 4, 1.0), limit, Asked(says))
        assert len(few) == sum(v >= 0.1 for v in best)


def test_chosen_nodes_go_by_sharper_probabilities():
    """Somewhat likely tokens: by a low temperature the likeliest is gone on from, however deep."""
    even = Distribution(np.arange(3), np.array([0.4, 0.3, 0.3]))
    first = Distribution(np.arange(3), np.array([0.5, 0.3, 0.2]))
    for temperature, kept in (
        (1.0, {(0,), (1,), (2,), (0, 0)}),
        (0.25, {(0,) * n for n in (1, 2, 3, 4)}),
    ):
        tree = tree_of(
            Dyspec(0.0, 4, temperature), 4, Asked(lambda prefix: even if prefix else first)
        )
        assert {
            (*before, token)
            for before, token in zip(prefixes(tree), tree.tokens.tolist(), strict=True)
        } == kept


def middling(law):
    """A draw that only goes by the law: what comes out of it is the same in any order of drawing."""
    best = [t for t in np.argsort(-law.weights, kind="stable").tolist() if law.weights[t] > 0]
    return int(law.tokens[best[min(1, len(best) - 1)]])


def by_heap(says, limit, depth):
    """DySpec as it is written: the slot of the largest value is drawn next."""
    slots, nodes, order = [(1.0, 0, (), ())], [], itertools.count(1)
    while slots and len(nodes) < limit:
        value, _, seen, tried = max(slots, key=lambda slot: (slot[0], -slot[1]))
        slots = [slot for slot in slots if slot[2:] != (seen, tried)]
        law = says(seen)
        left = type(law)(law.tokens, np.where(np.isin(law.tokens, tried), 0, law.weights))
        if not left.weights.any():
            continue
        token = middling(left)
        nodes.append((*seen, token))
        if len(seen) + 1 < depth:
            slots.append((value * left.of(token), next(order), (*seen, token), ()))
        slots.append((value * (1 - left.of(token)), next(order), seen, (*tried, token)))
    return set(nodes)


@pytest.mark.parametrize("limit", [1, 2, 4, 9])
def test_drawn_nodes_are_those_of_the_heap(limit):
    for seed in range(12):
        says = table(4, seed, zeros=seed % 2 == 1)
        tree = tree_of(Dyspec(0.0, 4, 1.0), limit, Asked(says), middling)
        got = {
            (*before, token)
            for before, token in zip(prefixes(tree), tree.tokens.tolist(), strict=True)
        }
        assert got == by_heap(says, limit, 4)


def test_dyspec_of_one_sure_token_after_the_other_is_a_chain():
    tree = tree_of(Dyspec(depth=9), 6, Asked(lambda prefix: ranked_law(len(prefix))))
    assert tree.tokens.tolist() == [0, 1, 2, 3, 0, 1] and tree.branch is None


def ranked_law(place):
    return Distribution(np.arange(4), np.eye(4)[place % 4])


def test_top():
    rng = np.random.default_rng(0)
    for size, count in [(3, 3), (100, 8), (2000, 1), (5000, 8), (70001, 8), (1300, 10), (300, 0)]:
        values = rng.integers(0, 40, (3, size)).astype(np.float32)  # many are equal
        want = np.argsort(-values, axis=1, kind="stable")[:, :count]
        assert np.array_equal(top(values, count), want)
    law = table(6, 3, zeros=True)(())
    tokens, probabilities = likeliest(law, 9)
    assert tokens == [t for t in ranked(table(6, 3, zeros=True), 9)(()) if t >= 0]
    np.testing.assert_allclose(probabilities, law.probabilities[tokens])


@pytest.mark.parametrize("limit", [NODES - 1, NODES, NODES + 5])
def test_sequoia_takes_all_nodes_that_cost_nothing_up_to_its_most(limit):
    shape = Sequoia(rates=[0.5, 0.2, 0.1], depth=8).begin(lambda nodes: 1.0)
    assert len(tree_of(shape, limit, Asked(table(6, 1)))) == min(limit, NODES)
