"""Lengths in the loop: who is asked, when, and what it is told."""

import numpy as np
import pytest

from accel.ir.axis import Axis
from accel.runtime.decode.costs import Costs
from accel.runtime.draft import Drafters
from accel.runtime.length._head import Head
from accel.runtime.length.fixed import Fixed
from accel.runtime.tree import Tree

from ..draft_case import Known, Says, plain, rows_of, speculated
from ..length_case import one

AXIS = Axis("length", "accel.runtime.length")


def test_a_drafter_asks_after_each_token_whether_to_go_on(toy):
    """The row's own pace answers; the tokens are the same."""
    group, asked, lengths = [[1, 2, 3], [4], [5, 6, 7, 8]], [], []
    rows = rows_of(group)
    plain(toy.session(batch=3), rows)
    found = {tuple(p): row.tokens for p, row in zip(group, rows, strict=True)}

    class Stops(Fixed):
        def begin(self, cost):
            return Stops()

        def more(self, level, logits):
            asked.append((id(self), token := int(level.tokens[0])))
            return bool(token % 3)

    class Stepwise(Drafters):
        def __init__(self, rows):
            self.rows = rows

        def draft(self, limits, more):
            trees = {}
            for i, limit in limits.items():
                future = found[tuple(group[i])][len(self.rows[i].tokens) :][:limit]
                ends = [
                    n + 1
                    for n, token in enumerate(future)
                    if not more.more(i, one(token, n), [np.zeros(toy.vocab)])
                ]
                trees[i] = Tree.chain(future[: ends[0]] if ends else future)
                lengths.append(len(trees[i]))
            return trees

    class Method(Says):
        def open(self, session, rows, context):
            return Stepwise(rows)

    with toy.session(batch=3) as session:
        rows = rows_of(group)
        list(speculated(session, rows, Method(None), length=Stops()))
        assert [row.tokens for row in rows] == [found[tuple(p)] for p in group]
    assert len({pace for pace, _ in asked}) == 3 and len(set(lengths)) > 1


@pytest.mark.parametrize(
    "name", [name for name in AXIS.names() if not issubclass(AXIS.method(name), Head)]
)
@pytest.mark.parametrize("costs", [None, Costs((1, 32), (1.0, 4.0))], ids=["free", "dear"])
def test_tokens_are_those_without_a_draft(toy, name, costs):
    """Of three rows, with drafts that stand, that fall in part and that fall, of drafters that are tried."""
    group = [[1, 2, 3], [4], [5, 6, 7, 8]]
    rows = rows_of(group)
    plain(toy.session(batch=3), rows)
    found = {tuple(p): row.tokens for p, row in zip(group, rows, strict=True)}
    for wrong in (0, 3, 1):
        with toy.session(batch=3) as session:
            rows = rows_of(group)
            drafter = Known(found, wrong=wrong, free=False)
            list(speculated(session, rows, drafter, costs=costs, length=AXIS.build(name)))
            assert [row.tokens for row in rows] == list(found.values())
        assert sum(row.drafting["rounds"] for row in rows) > 0
