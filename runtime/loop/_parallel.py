"""Loops in which the draft model drafts while the target verifies, each one step ahead of the other."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass

import numpy as np

from accel.ir.invariants import Invariant
from accel.runtime.backends import clock
from accel.runtime.call import Logits
from accel.runtime.decode.context import DecodeContext
from accel.runtime.decode.rounds import Rounds, begin_figures
from accel.runtime.decode.row import Row
from accel.runtime.inputs.ints import Ints
from accel.runtime.loop import Base
from accel.runtime.loop._foresight import Fate, Foresight
from accel.runtime.loop.speculative import DRAFTS_RELY, reach
from accel.runtime.session.session import Session
from accel.runtime.speculation.follow import Follower, opening, reads_whole, second
from accel.runtime.speculation.guard import TRIAL, Guard, round_costs
from accel.runtime.tree import Tree
from accel.runtime.verify import Chance, Target, match

ALONE = 2  # steps without a draft, which say what those with one beside them cost
NOTHING = np.zeros(0, np.int64)


@dataclass(frozen=True)
class Branch:
    """Tokens [n] that were drafted behind one that may come next. `sure`: how many come before the first that the draft
    model is unsure of; None: all.
    """

    tokens: Ints
    sure: int | None = None

    def first(self, fate: Fate) -> Ints:
        """Those that the next call is to verify, where the whole draft is to fare so."""
        counts = {Fate.NONE: 0, Fate.SOME: self.sure, Fate.ALL: None}
        return self.tokens[: counts[fate]]


NO_BRANCH = Branch(NOTHING)
Ahead = Mapping[int, Branch]  # what was drafted, by the token that may come next


class Parallel(Base):
    """What was drafted is verified by the next call where all before it stood and its first token came; otherwise that
    call takes one token. The output is that of plain decoding, also when sampling.
    """

    asks = {"draft": ""}
    relies = DRAFTS_RELY | {Invariant.DRAFT_MODEL}
    grade = "lossless"

    @abstractmethod
    def drafted(
        self, follower: Follower, texts: Mapping[int, Ints], sure: Mapping[int, int]
    ) -> Mapping[int, Ahead]:
        """What may follow each of these rows' tokens [n], of which the first `sure` are committed. There is room for a
        token in each (`Follower.most`).
        """

    def foresight(self, session: Session, rows: Sequence[Row], context: DecodeContext) -> Foresight:
        """What says of the drafts of these rows how they will fare."""
        return Foresight()

    def rounds(self, session: Session, rows: Sequence[Row], context: DecodeContext) -> Rounds:
        draft_model = second(context, self)
        with ExitStack() as stack:
            follower = Follower(draft_model, len(rows), self.grows)
            stack.enter_context(closing(follower))
            thread = stack.enter_context(
                ThreadPoolExecutor(1)
            )  # ends before the draft's session closes
            foresight = stack.enter_context(closing(self.foresight(session, rows, context)))
            found = _Rounds(self, session, rows, context, follower, thread, foresight)
            found.opened = stack.pop_all()
            return found


class _Rounds(Rounds):
    """`_pending`: tokens of each row that were drafted and are not checked; `opened`: what is closed at the end.
    `joins` is False: the draft's session is used by a thread of its own.
    """

    opened: ExitStack

    def __init__(
        self, of: Parallel, session: Session, rows: Sequence[Row], context: DecodeContext,
        follower: Follower, thread: ThreadPoolExecutor, foresight: Foresight,
    ):  # fmt: skip
        super().__init__(session, rows)
        self._foresight = foresight
        self._of = of
        self._follower, self._thread = follower, thread
        self._chances = [Chance(row.rng) for row in rows]
        self._pending = [np.zeros(0, np.int64) for _ in rows]
        self._reach = reach(session.capabilities)
        self._context, self._second = context, second(context, of)
        self._made = 0  # rounds with a draft beside
        self._guard = None
        if context.costs is not None:
            reading = opening(self._second, context, rows)
            self._guard = Guard(context.costs, session.batch, opening=reading)
        self._round_cost = round_costs(context.costs, session.batch)
        self._plain: list[float] = []  # seconds of the first steps, without a draft beside them
        begin_figures(rows)

    def close(self) -> None:
        self.opened.close()

    def run(self) -> list[tuple[int, int]]:
        live, rows, lengths = self.live, self._rows, self._session.lengths
        room = self._session.room
        alone = self._guard is not None and len(self._plain) < ALONE
        rests = alone or self._guard is not None and not self._guard.limit
        for i in live:
            self._pending[i] = self._pending[i][
                : 0 if rests else min(self._reach, rows[i].left - 1, int(room[i]) - 1)
            ]
        before, stood = {i: len(rows[i].tokens) for i in live}, []
        start = clock.now()
        try:
            logits, ahead, call, seconds = self._both(live, rests)
            for i in live:
                pending = self._pending[i].size
                try:
                    stood.append((pending, self._judged(i, logits[i], ahead.get(i, {}))))
                except Exception as error:
                    rows[i].fail(error)
        finally:  # what was judged stands, even where the draft fails
            taken = np.array(
                [len(row.tokens) - before.get(i, len(row.tokens)) for i, row in enumerate(rows)]
            )
            if (lengths + taken < self._session.lengths).any():
                self._session.rewind(np.minimum(lengths + taken, self._session.lengths))
        if alone:
            self._plain.append(seconds)
        elif self._guard is not None and rests:
            self._guard.rest()
        elif self._guard is not None and stood:
            usual = min(self._plain) * self._round_cost(max(drafted for drafted, _ in stood))
            self._guard.observe(
                float(taken.sum()) / len(live), stood, 0, max(0.0, seconds / usual - 1)
            )
        for i in live:
            rows[i].drafting["fallback"] += rests and not alone
        rows[0].clock(seconds - call, call, clock.now() - start)  # for all
        rows[0].draft_kv_bytes = max(rows[0].draft_kv_bytes, self._follower.kv_bytes)
        return [(i, token) for i in live for token in rows[i].tokens[before[i] :]]

    def _both(
        self, live: list[int], rests: bool
    ) -> tuple[Logits, Mapping[int, Ahead], float, float]:
        """The call's logits [B,T,V], what was drafted meanwhile, the call's seconds, and those of both."""
        start = clock.now()
        drafts = None if rests else self._thread.submit(self._drafted, live)
        try:
            logits = self._called(live)
        finally:  # the draft's session is free again before anything else happens
            end = clock.now()
            ahead: Mapping[int, Ahead] = {} if drafts is None else drafts.result()
        return logits, ahead, end - start, clock.now() - start

    def _drafted(self, live: list[int]) -> Mapping[int, Ahead]:
        """What the draft model says after each row's tokens and its pending ones."""
        texts = {i: np.concatenate([self._rows[i].seen, self._pending[i]]) for i in live}
        texts = {i: text for i, text in texts.items() if self._follower.most(text.size, 1) > 0}
        if not texts:
            return {}
        self._read(list(texts))
        return self._of.drafted(self._follower, texts, {i: self._rows[i].seen.size for i in texts})

    def _read(self, rows: list[int]) -> None:
        """Let the draft model read the ends of prompts, and once it has drafted the whole of those where that is
        little beside the steps to come.
        """
        self._made += 1
        for i in rows if self._guard is not None else ():
            row = self._rows[i]
            self._follower.ending(i, row.prompt.size)
            sure = self._made > TRIAL and self._follower.cut[i] > 0
            if sure and reads_whole(self._second, self._context, row):
                self._follower.whole(i)

    def _called(self, live: list[int]) -> Logits:
        """The logits [B,T,V] after each row's last token and after each pending one."""
        counts = np.zeros(len(self._rows), np.int64)
        counts[live] = [1 + self._pending[i].size for i in live]
        tokens = np.zeros((len(self._rows), int(counts.max())), np.int64)
        for i in live:
            tokens[i, : counts[i]] = [self._rows[i].tokens[-1], *self._pending[i]]
        return self._session.run(tokens, None if (counts == tokens.shape[1]).all() else counts)

    def _judged(self, i: int, logits: Logits, ahead: Ahead) -> int:
        """Let a row take what stands, up to its end; how many pending tokens that is. What was drafted behind them is
        pending from now on, where its first token came.
        """
        row, tree, before = self._rows[i], Tree.chain(self._pending[i]), len(self._rows[i].tokens)
        target = Target(tree, logits[: len(tree) + 1], row.seen, row.sampler)
        verdict = match(target, self._chances[i])
        row.accept_all(target.taken(verdict))
        stood = min(len(verdict.path), len(row.tokens) - before)
        row.drafting.update(rounds=len(tree) > 0, drafted=len(tree), accepted=stood)
        if len(tree):
            row.drafts[len(tree), stood] += 1
            self._foresight.observe(i, len(tree), stood)
        whole = len(verdict.path) == len(tree)
        branch = ahead.get(verdict.token, NO_BRANCH) if whole else NO_BRANCH
        found = branch.tokens
        if found.size and not row.finish:
            found = branch.first(self._foresight.fate(i, verdict.token))
        wrong = np.flatnonzero(
            found >= self._session.vocab_size
        )  # tokens that only the draft model has
        self._pending[i] = found[: wrong[0]] if wrong.size else found
        return stood
