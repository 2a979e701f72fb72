"""What drafters of single rows hold to: a chain of ids, no longer than was asked for, and nothing that rows share."""

import numpy as np
import pytest

from accel.ir.axis import Axis
from accel.runtime.draft import Base
from accel.runtime.tree import Tree

from ..draft_case import Says

AXIS = Axis("draft", "accel.runtime.draft")
VOCABULARY = 6
BY_ROW = [name for name in AXIS.names() if AXIS.method(name).begin is not Base.begin]


def drafts(drafter, seen, size, step=3):
    """What a row's drafter proposes while its tokens after a prompt of `size` come."""
    return [drafter.draft(seen[:end], 1 + end % 4) for end in range(size + 1, len(seen), step)]


def law(method):
    """Of two rows that take turns, each gets what it gets alone; no draft is too long or of other ids."""
    rng, proposed = np.random.default_rng(1), 0
    for size in (1, 2, 9, 30):
        rows = [rng.integers(0, VOCABULARY, 60), rng.permutation(60) % VOCABULARY]
        alone = [drafts(method.begin(seen[:size]), seen, size) for seen in rows]
        begun = [method.begin(seen[:size]) for seen in rows]
        for turn, end in enumerate(range(size + 1, 60, 3)):
            for i, seen in enumerate(rows):
                before, limit = seen[:end].copy(), 1 + end % 4
                tree = begun[i].draft(seen[:end], limit)
                assert np.array_equal(seen[:end], before), "it changed what it saw"
                assert len(tree) <= limit and tree.branch is None
                assert not len(tree) or tree.tokens.max() < VOCABULARY
                assert tree.tokens.tolist() == alone[i][turn].tokens.tolist(), (
                    "rows share something"
                )
                proposed += len(tree)
    assert proposed, "it never drafts"


@pytest.mark.parametrize("name", BY_ROW)
def test_every_drafter(name):
    law(AXIS.build(name))


def remembers():
    last = []

    def says(seen, limit):
        last.append(seen[-1])
        return Tree.chain(last[-2:-1])

    return says


BROKEN = {
    "too long": lambda seen, limit: Tree.chain(seen[-limit - 1 :]),
    "other ids": lambda seen, limit: Tree.chain([VOCABULARY]),
    "shared": remembers(),
    "silent": lambda seen, limit: Tree.chain([]),
}


@pytest.mark.parametrize("says", BROKEN)
def test_a_broken_one_is_caught(says):
    with pytest.raises(AssertionError):
        law(Says(BROKEN[says]))
