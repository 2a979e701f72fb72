"""Several drafters: the one whose draft is worth most, as the hybrids of SuffixDecoding (arXiv:2411.04975) and SAM
decoding (arXiv:2411.10666), or what all of them draft, as one tree.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from accel.ir.axis import Axis
from accel.ir.errors import RecipeError, shown
from accel.ir.facts import Facts
from accel.ir.invariants import Invariant
from accel.runtime.decode.context import DecodeContext
from accel.runtime.decode.row import Row
from accel.runtime.draft import Base, Drafters, More
from accel.runtime.draft._watch import stood
from accel.runtime.inputs.ints import Ints
from accel.runtime.inputs.text import Tokenizer
from accel.runtime.session.session import Session
from accel.runtime.speculation.guard import round_costs
from accel.runtime.speculation.odds import Odds
from accel.runtime.speculation.round_cost import RoundCost
from accel.runtime.tree import NONE, ROOT, Tree
from accel.runtime.verify import Verdict
from accel.runtime.verify.sample_match import SampleMatch

MEMBERS = ("suffix-tree", "token-recycling")
FADE = 0.95  # what a draft weighs after each later one
GIVE = 'give names, or tables such as {use = "suffix-tree", shared = true}'


@dataclass(frozen=True)
class Stack(Base):
    """`members`: drafters, two or more names or tables with their options (default: `suffix-tree` and
    `token-recycling`). All draft in each round, so they are ones that run no model.

    A draft is worth the tokens that it is expected to give for its cost, by how many tokens of its member's drafts of
    that size came lately, whether they were checked or not. `union`: the others' tokens follow as one tree, those of
    the next best first. Tokens are chosen, never drawn, so every rule stays exact.
    """

    members: Any = None
    union: bool = False
    built: tuple[Base, ...] = field(default=(), init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        given = MEMBERS if self.members is None else self.members
        if not isinstance(given, (list, tuple)) or len(given) < 2:
            raise RecipeError(f"draft.stack: members is {shown(given)}, not two or more; {GIVE}")
        object.__setattr__(self, "built", tuple(map(_built, given)))

    @property
    def asks(self) -> Mapping[str, str]:
        """Of members that ask for the same axis the first one's default."""
        return {axis: use for one in reversed(self.built) for axis, use in one.asks.items()}

    @property
    def relies(self) -> frozenset[Invariant]:
        return frozenset().union(*(one.relies for one in self.built))

    @property
    def breaks(self) -> frozenset[Invariant]:
        own = frozenset({Invariant.CHAINS}) if self.union else frozenset()
        return own.union(*(one.breaks for one in self.built))

    @property
    def provides(self) -> frozenset[Invariant]:
        """What each member that takes a shape of trees provides."""
        shaped = [one.provides for one in self.built if "tree" in one.asks]
        return frozenset.intersection(*shaped) if shaped else frozenset()

    def store(self, facts: Facts, tokenizer: Tokenizer | None) -> Any:
        stores = [one.store(facts, tokenizer) for one in self.built]
        return None if all(store is None for store in stores) else stores

    def open(self, session: Session, rows: Sequence[Row], context: DecodeContext) -> Drafters:
        methods = {**context.methods, "verify": SampleMatch()}  # which draws nothing
        with ExitStack() as opened:
            members = []
            for one, store in zip(
                self.built, context.store or [None] * len(self.built), strict=True
            ):
                own = replace(context, methods=methods, store=store)
                members.append(one.open(session, rows, own))
                opened.callback(members[-1].close)
            cost = round_costs(context.costs, len(rows))
            return _Stacked(rows, members, cost, self.union, opened.pop_all())


def _built(member: Any) -> Base:
    """A member. Raises RecipeError."""
    table = {"use": member} if isinstance(member, str) else member
    if not isinstance(table, Mapping) or not isinstance(table.get("use"), str):
        raise RecipeError(f"draft.stack: member {shown(member)} names no drafter; {GIVE}")
    use, options = table["use"], {k: v for k, v in table.items() if k != "use"}
    axis = Axis("draft", __package__)
    if use in axis.names() and axis.method(use) is Stack:
        raise RecipeError(
            "draft.stack: a stack is no member of a stack; give its members themselves"
        )
    try:
        method: Base = axis.build(use, **options)
    except RecipeError as error:
        raise RecipeError(f"draft.stack: {error}") from None
    if method.needs or method.draft_folder() is not None:
        raise RecipeError(
            f"draft.stack: {use} runs a model for each draft, and a stack's members all draft in each round; give "
            f"drafters that look tokens up, such as {', '.join(MEMBERS)}"
        )
    return method


class _Stacked(Drafters):
    def __init__(
        self,
        rows: Sequence[Row],
        members: Sequence[Drafters],
        cost: RoundCost,
        union: bool,
        opened: ExitStack,
    ):
        self.rows, self.members = rows, members
        self._cost, self._union, self._opened = cost, union, opened
        self._odds = _Record()
        self.free = all(one.free for one in members)
        self._open: dict[int, list[_Draft]] = {i: [] for i in range(len(rows))}

    def draft(self, limits: Mapping[int, int], more: More) -> Mapping[int, Tree]:
        found = [one.draft(limits, more) for one in self.members]
        return {
            i: self._worthiest(i, [trees.get(i, NONE) for trees in found], limit)
            for i, limit in limits.items()
        }

    def observe(
        self, row: int, tree: Tree, verdict: Verdict, logits: npt.NDArray[np.float32]
    ) -> None:
        for one in self.members:
            one.observe(row, tree, verdict, logits)

    @property
    def joins(self) -> bool:
        return all(one.joins for one in self.members)

    def join(self, other: Self) -> None:
        for mine, its in zip(self.members, other.members, strict=True):
            mine.join(its)
        count = len(self._open)
        self._odds.join(other._odds, count)
        for i, drafts in other._open.items():
            for draft in drafts:
                draft.whose = (count + i, draft.whose[1])
            self._open[count + i] = drafts

    def leave(self, order: Ints) -> None:
        for one in self.members:
            one.leave(order)
        place = {int(row): i for i, row in enumerate(order)}
        self._odds.leave(place)
        self._open = {place[i]: drafts for i, drafts in self._open.items() if i in place}
        for i, drafts in self._open.items():
            for draft in drafts:
                draft.whose = (i, draft.whose[1])

    def close(self) -> None:
        self._opened.close()

    def _worthiest(self, i: int, trees: Sequence[Tree], limit: int) -> Tree:
        """The best of a row's drafts, or all, the best first; none where none is worth its cost."""
        seen, odds = self.rows[i].seen, self._odds
        self._open[i] = [one for one in self._open[i] if not odds.observe(one, seen)]
        values = list[tuple[float, int, Tree]]()
        for member, tree in enumerate(trees):
            if len(tree):
                draft = _Draft((i, member), tree, seen.size)
                values.append((*self._value(odds.of(draft), draft), draft.tree))
                self._open[i].append(draft)
        values = [one for one in values if one[0] > 1]
        values.sort(key=lambda one: -one[0])  # of equals the earlier member's
        cut = [Tree.chain(t.tokens[:size]) if t.branch is None else t for _, size, t in values]
        if not cut:
            return NONE
        return merged(cut, limit) if self._union else cut[0]

    def _value(self, odds: Odds, draft: _Draft) -> tuple[float, int]:
        """Tokens that a draft is expected to give for its cost, and how much of a chain gives most."""
        expected, tree = odds.expected(draft.depth), draft.tree
        if tree.branch is not None:
            return expected[-1] / self._cost(len(tree)), len(tree)
        values = [expected[size] / self._cost(size) for size in range(1, len(tree) + 1)]
        best = int(np.argmax(values))
        return values[best], 1 + best


class _Draft:
    """A member's draft, until it is known how many of its tokens came."""

    def __init__(self, whose: tuple[int, int], tree: Tree, start: int):
        """`whose`: a row and a member; `start`: the place of its first token."""
        self.whose, self.tree, self.start = whose, tree, start
        self.depth = len(tree) if tree.branch is None else int(tree.depths.max())

    def stood(self, seen: Ints) -> int | None:
        """How many of its tokens came; None: some are still to come."""
        return stood(self.tree, seen[self.start :])


class _Record:
    """The odds of each row's members: of all of a member's drafts, and by their size, which go by those at first."""

    def __init__(self) -> None:
        self._all = defaultdict[tuple[int, int], Odds](lambda: Odds(FADE))
        self._sizes = dict[tuple[int, int, int], Odds]()

    def join(self, other: _Record, count: int) -> None:
        """Those of `other` go on as rows from number `count` on."""
        for (row, member), odds in other._all.items():
            self._all[count + row, member] = odds
        for (row, member, size), odds in other._sizes.items():
            self._sizes[count + row, member, size] = odds

    def leave(self, place: Mapping[int, int]) -> None:
        """Rows go on at these places; the others are forgotten."""
        kept = {(place[row], m): odds for (row, m), odds in self._all.items() if row in place}
        self._all.clear()
        self._all.update(kept)
        self._sizes = {
            (place[row], m, size): odds
            for (row, m, size), odds in self._sizes.items()
            if row in place
        }

    def of(self, draft: _Draft) -> Odds:
        key = (*draft.whose, draft.depth.bit_length())
        if key not in self._sizes:
            self._sizes[key] = Odds(FADE, self._all[draft.whose])
        return self._sizes[key]

    def observe(self, draft: _Draft, seen: Ints) -> bool:
        """Whether it is known by now what came of a draft; then the odds hear of it."""
        count = draft.stood(seen)
        if count is None:
            return False
        for odds in (self._all[draft.whose], self.of(draft)):
            odds.observe([(draft.depth, count)])
        return True


def merged(trees: Sequence[Tree], limit: int) -> Tree:
    """Trees as one of at most `limit` nodes, the nodes of earlier ones first."""
    nodes = dict[tuple[int, int], int]()  # (parent, token) -> node
    for tree in trees:
        place = {ROOT: ROOT}
        for node, (token, parent) in enumerate(
            zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True)
        ):
            if parent not in place:  # beyond the limit
                continue
            key = (place[parent], token)
            if key in nodes or len(nodes) < limit:
                place[node] = nodes.setdefault(key, len(nodes))
    return Tree(
        np.array([token for _, token in nodes], np.int64),
        np.array([parent for parent, _ in nodes], np.int64),
    )
