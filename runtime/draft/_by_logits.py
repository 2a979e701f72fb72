"""What all drafters that run a model have in common: rows that draft together, a call of the model for each level."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Self

import numpy as np

from accel.ir.errors import AccelError
from accel.runtime.call import Logits
from accel.runtime.decode.context import DecodeContext
from accel.runtime.decode.rounds import picked
from accel.runtime.decode.row import Row
from accel.runtime.draft import Drafters, More
from accel.runtime.inputs.ints import Ints
from accel.runtime.sample import Distribution
from accel.runtime.speculation.guard import round_costs
from accel.runtime.tree import Growth, Guesses, Level, Shape, Tree, grown
from accel.runtime.verify import Base as Rule
from accel.runtime.verify import Chance, Verdict


class ByModel(Drafters):
    """Each row's tokens are drawn with its own sampler's settings, or chosen where the row or the rule draws none
    (`verify.Base.drawing`), as the tree's shape asks for them.
    """

    def __init__(
        self, rows: Sequence[Row], context: DecodeContext, vocab_size: int, draft_cost: float
    ):
        """`vocab_size`: the target's tokens, of which drafts are made."""
        rule: Rule = context.methods["verify"]
        cost = round_costs(context.costs, len(rows))
        self.rows, self.draft_cost = rows, draft_cost
        self.draws = [rule.drawing(row.sampler, Chance(row.rng)) for row in rows]
        self.shapes: list[Shape] = [context.methods["tree"].begin(cost, draft_cost) for _ in rows]
        self._vocab = vocab_size
        self._drops: bool = context.methods["tree"].drops
        self._trees: Mapping[int, Tree] = {}

    def join(self, other: Self) -> None:
        self.draws += other.draws
        self.shapes += other.shapes
        self._trees = {}

    def leave(self, order: Ints) -> None:
        self.draws, self.shapes = picked(self.draws, order), picked(self.shapes, order)
        self._trees = {}

    def grow(self, row: int, limit: int) -> Growth:
        """The next tree of a row, of at most `limit` tokens."""
        self.shapes[row].read(self.rows[row].seen)
        return self.shapes[row].grow(limit, self.draws[row])

    def law(self, row: int, logits: Logits, seen: Ints) -> Distribution | None:
        """What may follow tokens [n], by a row's sampler and what the model says [V]; None where the request lets
        nothing follow them, or the model says no numbers: the row's own text may never come there, and fails by itself
        where it does.
        """
        try:
            return self.said(row, logits, seen)
        except AccelError:
            return None

    def said(self, row: int, logits: Logits, seen: Ints) -> Distribution:
        """The same; raises AccelError where nothing may follow."""
        return self.rows[row].sampler.distribution(logits, seen)

    def observe(self, row: int, tree: Tree, verdict: Verdict, logits: Logits) -> None:
        if tree is self._trees.get(row):
            self.shapes[row].observe(tree, verdict.path)


class ByLogits(ByModel):
    """Chains, a token after the other."""

    def draft(self, limits: Mapping[int, int], more: More) -> Mapping[int, Tree]:
        self._trees = {}
        allowed = {i: most for i, limit in limits.items() if (most := self.most(i, limit)) > 0}
        if not allowed:
            return {}
        paths = {i: _path(self.rows[i].seen, most) for i, most in allowed.items()}
        sizes = {i: self.rows[i].seen.size for i in allowed}
        last: dict[int, Logits] = {}  # what each row's newest token was chosen by
        waiting: dict[int, list[Logits]] = {}  # what was said of rows that wait
        reported = dict.fromkeys(allowed, 0)  # tokens of each row that its length heard of

        def goes_on(i: int, level: Level) -> bool:
            reported[i] += 1
            return more.more(i, level, [last[i]])

        def expand(levels: dict[int, Level]) -> dict[int, Guesses | Level]:
            if last:
                new = [i for i in levels if i not in waiting]
                asked = {i: levels[i] for i in new if goes_on(i, levels[i])}
                tokens = {i: int(level.tokens[0]) for i, level in asked.items()}
                for i, token in tokens.items():
                    paths[i][sizes[i]] = token
                    sizes[i] += 1
                logits = self.further(tokens) if tokens else np.zeros(0, np.float32)
            else:
                tokens = dict.fromkeys(levels, 0)
                logits = self.first(list(levels))
            guesses: dict[int, Guesses | Level] = {}
            said = waiting | {i: [logits[i, -1, : self._vocab]] for i in tokens}
            waiting.clear()
            for i in more.draws(said):
                last[i] = said[i][0]
                guesses[i] = [self.law(i, last[i], paths[i][: sizes[i]])]
            if guesses:
                waiting.update((i, one) for i, one in said.items() if i not in guesses)
                guesses |= {i: levels[i] for i in waiting}
            return guesses

        shapes = {i: self.grow(i, most) for i, most in allowed.items()}
        try:
            trees = grown(shapes, expand)
        finally:
            self.done()
        for i, tree in trees.items():
            if len(tree) > reported[i]:
                goes_on(i, Level(tree.tokens[-1:], np.array([reported[i]])))
        self._trees = trees
        return trees

    def most(self, row: int, limit: int) -> int:
        """Tokens that a row may draft now, of `limit`."""
        return limit

    @abstractmethod
    def first(self, rows: list[int]) -> Logits:
        """The logits [B,n,V] whose last say what follows the committed tokens of these rows."""

    @abstractmethod
    def further(self, tokens: dict[int, int]) -> Logits:
        """The same after one more drafted token of each of these rows, among the last that were asked."""

    def done(self) -> None:
        """The draft is whole."""


def _path(seen: Ints, more: int) -> Ints:
    """Tokens with room for more."""
    return np.concatenate([seen, np.zeros(more, np.int64)])
