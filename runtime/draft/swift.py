"""SWIFT (arXiv:2410.06916): self-speculative decoding; drafts leave out attentions and MLPs, by a plan that is searched
while the model generates, and all of it verifies, with one cache.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from accel.ir.axis import option
from accel.ir.invariants import Invariant
from accel.runtime.decode.context import DecodeContext
from accel.runtime.decode.row import Row
from accel.runtime.draft import Base, Drafters, More
from accel.runtime.draft._by_self import BySelf, cost_of
from accel.runtime.draft._plans import Branch, Plan, every_second, layers_by_branch
from accel.runtime.session.session import Session
from accel.runtime.tree import Tree

FAILURES, CANDIDATES = (
    300,
    1000,
)  # candidates that were no better, and all of them, after which a search ends


@dataclass(frozen=True)
class Swift(Base):
    """A drafted token runs all but the fraction `skip` of the attentions and MLPs of the layers between the first and
    the last. At first those of layers 1, 3, 5 and so on are left out.

    Before each draft, once there are `window` new tokens, another plan of the same size is tried, drawn at random: a
    call of a copy of the session (`Session.fork`) runs the newest `window` tokens by it, and its score is the share of
    them for which it says the token that came. The best plan drafts. The search ends at a score above `enough`, after
    300 plans that were no better, or 1000. Each request begins anew.

    The recipe gets `depth = by-branch`, which puts each branch under a condition and skips none by default.
    """

    skip: float = option(0.45, least=0, below=1)
    window: int = option(32, least=1, most=512)
    enough: float = option(0.95, least=0, most=1)

    lacks = "draft trees, and the Bayesian optimiser that proposes every 25th plan: all are drawn at random"
    asks = {"tree": "chain", "length": "draft-verify"}
    needs = {"depth": "by-branch"}
    relies = frozenset({Invariant.CHAINS, Invariant.BRANCHES_BY_CALL})
    provides = frozenset({Invariant.PROBABILITIES})

    def open(self, session: Session, rows: Sequence[Row], context: DecodeContext) -> Drafters:
        layers = layers_by_branch(context, self.full_name)
        search = Search(self, layers)
        return _Searching(session, rows, context, cost_of(context, search.plan.share), search)


class Search:
    """The best plan of those that were tried. `plan`: the best; `candidate`: the one to be scored next."""

    def __init__(self, of: Swift, layers: int):
        self._of, self._layers, self.window = of, layers, of.window
        self._skippable: list[Branch] = list(every_second(layers))
        self._count = int(of.skip * len(self._skippable))
        self._rng = np.random.default_rng(0)
        self.plan = self.candidate = self._without(islice(self._skippable, self._count))
        self.score = -1.0  # of the best plan
        self.tried = self._failed = 0

    @property
    def over(self) -> bool:
        """Whether no more plans are to be tried."""
        only = self._count in (0, len(self._skippable))
        ended = self._failed >= FAILURES or self.tried >= CANDIDATES
        return only or ended or self.score > self._of.enough

    def scored(self, score: float) -> None:
        """The candidate's score; another is drawn."""
        self.tried += 1
        if score > self.score:
            self.plan, self.score = self.candidate, score
        else:
            self._failed += 1
        chosen = self._rng.choice(len(self._skippable), self._count, replace=False)
        self.candidate = self._without(self._skippable[i] for i in chosen)

    def _without(self, branches: Iterable[Branch]) -> Plan:
        return Plan.without(set(branches), self._layers)


class _Searching(BySelf):
    def __init__(
        self,
        session: Session,
        rows: Sequence[Row],
        context: DecodeContext,
        draft_cost: float,
        search: Search,
    ):
        super().__init__(session, rows, context, draft_cost, **search.plan.controls)
        self.search = search

    def draft(self, limits: Mapping[int, int], more: More) -> Mapping[int, Tree]:
        rows = [i for i in limits if len(self.rows[i].tokens) > self.search.window]
        if rows and not self.search.over and self._goes_back:
            self.search.scored(self._score(rows))
            self.less = self.search.plan.controls
        return super().draft(limits, more)

    @property
    def _goes_back(self) -> bool:
        back, wide = self._session.capabilities.back, self._session.capabilities.width
        return all(most is None or most >= self.search.window for most in (back, wide))

    def _score(self, rows: Sequence[int]) -> float:
        """Of the newest tokens of these rows, the share of which the candidate says what came. The session is as
        before: a copy of it runs them.
        """
        window = self.search.window
        tokens = np.zeros((self._session.batch, window), np.int64)
        counts = np.zeros(self._session.batch, np.int64)
        counts[rows] = window
        for i in rows:
            tokens[i] = self.rows[i].seen[-window - 1 : -1]
        with self._session.fork() as copy:
            copy.rewind(copy.lengths - counts)
            logits = copy.run(tokens, counts, **self.search.candidate.controls)
        said = logits[rows][:, :, : self._vocab].argmax(-1)
        came = np.stack([self.rows[i].seen[-window:] for i in rows])
        return float((said == came).mean())
