"""The record of a drafted tree: its form, what each token was drawn from, and what does not fit."""

import numpy as np
import pytest

from accel.ir.errors import InputError
from accel.runtime.sample import Distribution
from accel.runtime.tree import ROOT, Tree, without

FORM = np.array([-1, -1, 0, 0, 2, 1])
TOKENS = np.array([4, 2, 4, 0, 1, 1])


def test_form():
    tree = Tree(TOKENS, FORM)
    assert tree.depths.tolist() == [1, 1, 2, 2, 3, 2]
    assert [list(tree.children(n)) for n in range(ROOT, 6)] == [
        [0, 1],
        [2, 3],
        [5],
        [4],
        [],
        [],
        [],
    ]
    assert [tree.path(n) for n in (ROOT, 0, 4)] == [(), (0,), (0, 2, 4)]
    for node in range(6):
        seen = np.flatnonzero(tree.mask[node + 1]) - 1
        assert seen.tolist() == [ROOT, *tree.path(node)], "its ancestors and itself"
    assert tree.mask[0].tolist() == [True] + [False] * 6
    assert tree.branch == 1


@pytest.mark.parametrize("count", range(4))
def test_a_chain_is_a_tree(count):
    tree = Tree.chain(list(range(count)), np.full((count, 5), 0.2))
    assert (len(tree), tree.branch) == (count, None)
    assert np.array_equal(tree.mask, np.tri(count + 1, dtype=bool))


def test_siblings_are_drawn_from_what_those_before_left():
    q = np.array([[0.5, 0.25, 0.25, 0.0], [0.0, 0.0, 1.0, 0.0]], np.float32)
    tree = Tree([0, 2, 1, 3, 2, 0], [-1, -1, -1, -1, 1, 1], q, [0, 0, 0, 0, 1, -1])
    laws = [[0.5, 0.25, 0.25, 0], [0, 0.5, 0.5, 0], [0, 1, 0, 0], [0, 0, 0, 1], [0, 0, 1, 0]]
    assert [tree.law(n).dense(4).tolist() for n in range(5)] == laws
    assert tree.law(5).dense(4).tolist() == [1, 0, 0, 0], "chosen"
    whole = Tree([0, 0, 2], [-1, -1, -1], q, [0, 0, 0], replacement=True)
    assert [whole.law(n).dense(4).tolist() for n in range(3)] == [laws[0]] * 3
    assert Tree([0, 1], [-1, -1]).law(1).dense(4).tolist() == [0, 1, 0, 0]


def test_a_law_that_is_used_up_is_even_over_the_others():
    law = Distribution(np.arange(3), np.array([0.0, 1.0, 0.0], np.float32))
    assert without(law, np.array([1])).dense(3).tolist() == [0.5, 0, 0.5]
    assert without(law, np.array([1, 2, 9])).dense(3).tolist() == [1, 0, 0]
    assert without(law, np.array([0])).dense(3).tolist() == [0, 1, 0]
    assert law.weights.tolist() == [0, 1, 0], "not changed"


EVEN = np.full((2, 4), 0.25)
BAD = {
    "draws without replacement": (
        ([0, 1], [-1, -1], EVEN, [0, 0], False, [0, 1]),
        "set replacement = True",
    ),
    "a draw of no node": (
        ([0, 1], [-1, -1], EVEN, [0, 0], True, [0, 2]),
        "are no list of nodes; give each of the 2",
    ),
    "a node never drawn": (
        ([0, 1], [-1, -1], EVEN, [0, 0], True, [0, 0]),
        "hold node 1 0 times, but it is there",
    ),
    "chosen twice": (
        ([0, 1], [-1, -1], EVEN, [0, -1], True, [0, 1, 1]),
        "node 1 2 times, but it was chosen",
    ),
    "a parent after its child": (([0, 1], [1, -1]), r"node 0 has parent 1; .* -1 .* to -1"),
    "its own parent": (([0, 1], [-1, 1]), "node 1 has parent 1; a parent comes before its child"),
    "below the root": (([0], [-2]), "node 0 has parent -2"),
    "no id": (([0, -5], [-1, 0]), "node 1 has token -5; ids are 0 or more"),
    "no integer": (([0.5], [-1]), "tree: tokens: float64 is not an integer type"),
    "two dimensions": (([[0]], [-1]), r"tokens has shape \[1, 1\]"),
    "too few parents": (
        ([0, 1], [-1]),
        r"parents has shape \[1\]; give one number for each token, \[2\]",
    ),
    "twice": (
        ([3, 3], [-1, -1], EVEN),
        "siblings 0 and 1 both hold token 3; merge them, or set repl",
    ),
    "too few rows": (
        ([0, 1, 2], [-1, 0, 1], EVEN),
        "node 2 was sampled from row 2 of q, which has 2 rows",
    ),
    "rows without q": (
        ([0], [-1], None, [0]),
        "node 0 was sampled from row 0 of q, which has 0 rows",
    ),
    "row -2": (([0], [-1], EVEN, [-2]), "node 0 was sampled from row -2 of q"),
    "rows of others": (([0], [-1], EVEN, [0, 1]), r"rows has shape \[2\]"),
    "a token beyond q": (
        ([0, 4], [-1, 0], EVEN),
        r"node 1 holds token 4, but q has columns for 0..3",
    ),
    "q of one row": (([0], [-1], EVEN[0]), r"q is float64 \[4\]; give float probabilities"),
    "q of counts": (([0], [-1], EVEN.astype(int)), r"q is int64 \[2, 4\]"),
}


@pytest.mark.parametrize("given, message", BAD.values(), ids=BAD)
def test_parts_that_do_not_fit(given, message):
    with pytest.raises(InputError, match=message):
        Tree(*given)


@pytest.mark.parametrize(
    "row", [[0.5, 0.6], [np.nan, 1], [1.5, -0.5], [0, 0], [np.inf, 0]], ids=str
)
def test_a_row_that_is_no_distribution(row):
    tree = Tree.chain([0], np.array([row], float))
    with pytest.raises(
        InputError, match="row 0 of q is not a distribution: its sum is .* node 0 was sampled"
    ):
        tree.law(0)
