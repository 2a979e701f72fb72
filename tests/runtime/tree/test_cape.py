"""CaPE: a chain with siblings where the drafter is unsure, and widths that must not go by what was drawn."""

import pytest

from accel.ir.errors import RecipeError
from accel.runtime.tree import Siblings
from accel.runtime.tree._nodes import likeliest
from accel.runtime.tree.cape import Cape
from accel.runtime.tree.chain import Chain

from ...grow_case import AXIS, Asked, prefixes, table, tree_of
from ...laws.test_tree import law_exact


def test_the_chain_and_as_many_siblings_as_it_is_unsure():
    usual = Cape()
    for seed in range(4):
        says = table(12, seed)
        tree = tree_of(usual, 99, Asked(says))
        chain = tree_of(Chain(), 4, Asked(says)).tokens.tolist()
        firsts = [
            node
            for node in range(len(tree))
            if tree.children(node) or node == tree.children(int(tree.parents[node]))[0]
        ]
        assert tree.tokens[firsts].tolist() == chain, "so a greedy target accepts no less"
        for place in range(4):
            before = tuple(chain[:place])
            sure = says(before).weights.max() / says(before).weights.sum()
            width = 8 if sure < 0.3 else 6 if sure < 0.6 else 4 if sure < 0.8 else 2
            assert prefixes(tree).count(before) == width


def test_ones_are_a_chain_and_a_limit_cuts_the_last_place():
    says = table(12, 0)
    alone = tree_of(Cape([1] * 10), 99, Asked(says))
    assert alone.branch is None
    assert alone.tokens.tolist() == tree_of(Chain(), 4, Asked(says)).tokens.tolist()
    whole = tree_of(Cape(), 99, Asked(says))
    for limit in range(len(whole)):
        cut = tree_of(Cape(), limit, Asked(says))
        assert cut.tokens.tolist() == whole.tokens[:limit].tolist()


class Draws(Cape):
    """The chain's tokens are drawn, and siblings chosen after them. As many as the width that was fixed `before`, or by
    the probability of what was drawn, which is left out where it is not among so many.
    """

    siblings = Siblings.APART
    before = True

    def _place(self, nodes, last, guess, room, draw):
        if draw is None:
            return super()._place(nodes, last, guess, room, draw)
        token = draw(guess)
        odds = likeliest(guess, 1)[1][0] if self.before else guess.of(token)
        best = likeliest(guess, min(room, self.widths[min(9, int(10 * odds))]))[0]
        if not self.before and token not in best:
            return nodes.add(last, best)[0]
        first = nodes.add(last, [token], guess)[0]
        nodes.add(last, [one for one in best if one != token][: room - 1])
        return first


class After(Draws):
    before = False


def test_widths_may_not_be_chosen_after_the_draw():
    widths = [1] * 6 + [2] * 4
    law_exact(Draws(widths))
    with pytest.raises(AssertionError):
        law_exact(After(widths))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"widths": [1, 2]}, r"widths are \[1, 2\]; give ten numbers of 1 to 64"),
        ({"widths": [0] * 10}, "give ten numbers"),
        ({"widths": "8888664422"}, "give ten numbers"),
        ({"depth": 0}, "depth is 0; give 1 to 64"),
    ],
)
def test_options(options, words):
    with pytest.raises(RecipeError, match=words):
        AXIS.build("cape", **options)
