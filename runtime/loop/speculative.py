"""Speculative decoding (arXiv:2211.17192): tokens are drafted, one call of the model verifies them, a rule
accepts or rejects.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from accel.ir.errors import InputError
from accel.ir.invariants import Invariant
from accel.runtime.backends import clock
from accel.runtime.call import Logits
from accel.runtime.decode.context import DecodeContext
from accel.runtime.decode.rounds import Rounds, begin_figures, picked
from accel.runtime.decode.row import Row
from accel.runtime.draft import Drafters
from accel.runtime.draft._watch import LOOK, Drafted, Watch, foretold
from accel.runtime.inputs.ints import Ints
from accel.runtime.length import Paces
from accel.runtime.loop import Base
from accel.runtime.session.core import CHUNK
from accel.runtime.session.observers.observer import Capabilities
from accel.runtime.session.session import Session
from accel.runtime.speculation.guard import MOST, Guard
from accel.runtime.speculation.round_cost import unmeasured_cost
from accel.runtime.tree import NONE, Tree
from accel.runtime.verify import Chance, Target, Verdict

# of every loop that drafts: `session.capabilities` says the same of what was built
DRAFTS_RELY = frozenset({Invariant.DECODE_WIDTH, Invariant.REWIND})
FORETELLING = 0.5  # plain steps that it may take to hold drafts against the ends of prompts


@dataclass(frozen=True)
class Speculative(Base):
    """Rows draft independently and share each call, padded on the right; a row without a draft takes one
    token in it. Drafting pauses while it is slower than plain decoding (`speculation/guard.py`).
    """

    asks = {"draft": "", "verify": "spec-chain", "length": "fixed"}
    relies = DRAFTS_RELY

    def rounds(self, session: Session, rows: Sequence[Row], context: DecodeContext) -> Rounds:
        return _Rounds(session, rows, context)


def reach(capabilities: Capabilities) -> int:
    """Most tokens of a draft that one graph call checks as single calls would, and that can be taken back.

    Raises InputError where that is none.
    """
    wide = CHUNK if capabilities.width is None else min(capabilities.width, CHUNK)
    found = wide - 1 if capabilities.back is None else min(wide - 1, capabilities.back)
    if found < 1:
        back = "any number of" if capabilities.back is None else capabilities.back
        raise InputError(
            "loop: drafts are verified several tokens in one call, and rejected ones rewound; "
            f"sessions of this model can rewind {back} tokens, and give exact results for calls "
            f"of up to {wide} tokens (session.capabilities); "
            "build with loop = autoregressive"
        )
    return found


class _Rounds(Rounds):
    def __init__(self, session: Session, rows: Sequence[Row], context: DecodeContext):
        super().__init__(session, rows)
        self._context = context
        self._reach = reach(session.capabilities)
        self._draft, self._rule = context.methods["draft"], context.methods["verify"]
        self._chances = [Chance(row.rng) for row in rows]
        begin_figures(rows)
        if context.model is not None:
            self._draft.fit(context.model)
            context.methods["length"].fit(context.model)
        self._drafters: Drafters = self._draft.open(session, self._rows, context)
        draft_cost = self._drafters.draft_cost
        costs = context.costs if self._rule.verifies else None
        probes = self._drafters.probes
        shaping = (self._draft, context.methods.get("tree", self._draft))
        trees = any(Invariant.CHAINS in one.breaks for one in shaping)
        given = trees and not probes, probes, self._drafters.free, self._drafters.opening
        self._guard = None if costs is None else Guard(costs, session.batch, draft_cost, *given)
        self._watch, self._looked = (
            Watch(),
            0.0,
        )  # drafts beside plain steps, and their seconds of this round
        self._look_at = min(self._reach, MOST if trees else LOOK)  # tokens of one
        self._prompts = self._drafters.free  # whether they are still to be looked at
        self._paces: Paces = context.methods["length"].open(self._rows, self._cost)
        self._drafting = 0.0  # the drafters' time of this round, in seconds
        self._computed: int | None = None  # tokens of this round's call, if of chains
        self._drafts: list[
            tuple[int, int]
        ] = []  # of this round: levels drafted, and those that stood
        self._most = 0  # tokens of its largest draft

    def close(self) -> None:
        """Free what the drafters hold."""
        self._drafters.close()

    @property
    def joins(self) -> bool:
        return self._drafters.joins and self._paces.joins

    @property
    def widest(self) -> int:
        return 1 + (self._reach if self._guard is None else min(self._reach, MOST))

    def joined(self, other: Self) -> None:
        self._chances += other._chances
        self._drafters.join(other._drafters)
        self._paces.join(other._paces)
        self._watch.drop()
        other._guard = self._guard  # whose costs the paces of its rows go by
        if self._guard is not None:
            self._guard.of_batch(self._session.batch)

    def left(self, order: Ints) -> None:
        self._chances = picked(self._chances, order)
        self._drafters.leave(order)
        self._paces.leave(order)
        self._watch.drop()
        if self._guard is not None:
            self._guard.of_batch(self._session.batch)

    def run(self) -> list[tuple[int, int]]:
        self._drafts, self._most, self._computed, self._looked = [], 0, None, 0.0
        start, begun = clock.now(), self._time()
        limit = self._limit()
        trees = self._drafted(limit)
        self._drafting = self._time() - begun
        if not any(map(len, trees.values())):
            return self._plain(list(trees), start, limit)
        lengths, kept_columns = self._session.lengths, dict[int, list[int]]()
        before = {i: len(self._rows[i].tokens) for i in trees}
        called = clock.now()
        branches = any(tree.branch is not None for tree in trees.values())
        logits = self._called(trees, branches)
        call = clock.now() - called
        try:
            for i, tree in trees.items():
                try:
                    kept_columns[i] = self._judged(i, tree, logits[i, : len(tree) + 1])
                except Exception as error:
                    self._rows[i].fail(error)
        finally:  # what was judged stands, even where it is interrupted
            back = self._settle(kept_columns, lengths, branches)
        whole = clock.now() - start
        if self._drafts:
            self._weigh(kept_columns, back, self._drafting / max(call, 1e-9), whole)
        self._rows[0].clock(self._drafting, call, whole)  # for all
        self._rows[0].draft_kv_bytes = max(self._rows[0].draft_kv_bytes, self._drafters.kv_bytes)
        return [(i, token) for i in trees for token in self._rows[i].tokens[before[i] :]]

    def _cost(self, drafted: int) -> float:
        """Of a round that drafts so many tokens for each row, in plain steps."""
        return unmeasured_cost(drafted) if self._guard is None else self._guard.cost(drafted)

    def _limit(self) -> int:
        """Most tokens of a draft, by what can be taken back and what pays."""
        if self._guard is None:
            return self._reach
        if self._guard.due:
            start = clock.now()
            drafts = self._drafters.probe(self.live)
            self._guard.probe(drafts, clock.now() - start)
        if self._guard.watching:
            self._look(self._guard)
        return min(self._reach, self._guard.limit)

    def _look(self, guard: Guard) -> None:
        """See what became of drafts that were made beside plain steps, and make others where it is still to be seen
        whether they pay.
        """
        start = clock.host_now()
        if self._prompts:
            self._prompts = False
            for drafts in self._foretold(start + FORETELLING * guard.step):
                guard.watch(drafts, 0.0)
        if found := self._watch.outcomes(self._rows, self._padded):
            guard.watch(found, 0.0)
        if guard.limit:
            self._watch.drop()
        elif not self._watch.open:
            live = self.live
            limits = {i: min(self._look_at, self._rows[i].left - 1) for i in live}
            limits = {i: most for i, most in limits.items() if most > 0}
            trees = self._drafters.draft(limits, self._paces) if limits else {}
            self._watch.put(trees, self._rows, live)
        self._looked = clock.host_now() - start

    def _foretold(self, until: float) -> Iterator[list[Drafted]]:
        """What drafts would have been of the last tokens of the prompts."""

        def drafting(heads: Sequence[Row]) -> Callable[[Mapping[int, int]], Mapping[int, Tree]]:
            drafters = self._draft.open(self._session, heads, self._context)
            return lambda limits: drafters.draft(limits, self._paces)

        prompts = {id(row.prompt): row.prompt_text for row in (self._rows[i] for i in self.live)}
        limit = min(self._reach, MOST)
        return foretold(
            drafting, list(prompts.values()), limit, self._padded, lambda: clock.host_now() < until
        )

    @property
    def _padded(self) -> bool:
        """Whether a call computes as much for each row as for the one of most tokens."""
        counts = np.ones(len(self._rows), np.int64)
        counts[0] = 1 + LOOK
        return self._session.computed(counts) > int(counts.sum())

    def _plain(self, live: list[int], start: float, limit: int) -> list[tuple[int, int]]:
        """A round in which no row has a draft, as quick as any loop's; `limit`: of those that were asked for, of which
        drafters hear, as of those that are watched.
        """
        rows, taken = self._rows, list[tuple[int, int]]()
        watching = not limit and self._guard is not None and self._guard.watching
        told = limit > 0 or watching
        called = clock.now()
        logits = self._call(live)
        call = clock.now() - called
        try:
            for i in live:
                try:
                    token = rows[i].pick(logits[i, 0])
                    if told:
                        observed = clock.host_now()
                        self._observe(i, NONE, Verdict((), token), logits[i])
                        self._looked += clock.host_now() - observed
                    rows[i].accept(token, logits[i, 0])
                except Exception as error:
                    rows[i].fail(error)
                else:
                    taken.append((i, token))
        finally:  # what was taken stands, even where it is interrupted
            if len(taken) < len(live):
                counts = np.zeros(len(rows), np.int64)
                counts[live] = 1
                counts[[i for i, _ in taken]] = 0
                self._session.rewind(self._session.lengths - counts)
        whole = clock.now() - start
        if self._guard is not None:
            self._guard.rest(whole)
            if watching:
                self._guard.watch([], self._looked)
        rows[0].clock(self._drafting, call, whole)  # for all
        return taken

    def _settle(self, kept_columns: dict[int, list[int]], lengths: Ints, branches: bool) -> bool:
        """Hold what stands of the last call: columns of each row. Whether tokens were taken back."""
        if branches:
            self._session.keep([kept_columns.get(i, ()) for i in range(len(self._rows))])
            return False
        new_lengths = lengths + [len(kept_columns.get(i, ())) for i in range(len(self._rows))]
        if back := bool((new_lengths < self._session.lengths).any()):
            self._session.rewind(new_lengths)
        return back

    def _drafted(self, limit: int) -> dict[int, Tree]:
        """What each row that runs is to have checked. Raises InputError where that cannot be."""
        live = self.live
        limits = {i: min(limit, most) for i, most in self._paces.limits(live).items()}
        for i, most in limits.items():
            self._rows[i].drafting["fallback"] += most < 1
        if limit < 1:
            return dict.fromkeys(live, NONE)
        room = self._session.room
        limits = {
            i: min(most, self._rows[i].left - 1, int(room[i]) - 1) for i, most in limits.items()
        }
        limits = {i: most for i, most in limits.items() if most > 0}
        found = self._drafters.draft(limits, self._paces) if limits else {}
        kept = self._paces.keeps({i: len(tree) for i, tree in found.items()})
        found = {
            i: tree.head(kept[i]) if kept[i] < len(tree) else tree for i, tree in found.items()
        }
        for i, tree in found.items():
            self._check(tree, limits.get(i, 0))
        return {i: found.get(i, NONE) for i in live}

    def _check(self, tree: Tree, most: int) -> None:
        """Raise InputError for a draft that cannot be checked."""
        name = f"draft.{self._draft.use}"
        if len(tree) > most:
            raise InputError(
                f"{name} drafted {len(tree)} tokens but {most} were requested; give at most that many"
            )
        if tree.branch is not None and not self._session.capabilities.trees:
            raise InputError(
                f"{name} drafted a branching tree, but this model takes chains only (session.capabilities); "
                "build it with a recipe with a branching tree, or draft chains (Tree.chain)"
            )
        if len(tree) and (wrong := int(tree.tokens.max())) >= self._session.vocab_size:
            raise InputError(
                f"{name} drafted token {wrong}, but the model's tokens are "
                f"0..{self._session.vocab_size - 1}; draft from "
                "the same vocabulary"
            )

    def _called(self, trees: dict[int, Tree], branches: bool) -> Logits:
        """The logits [B,T,V] after each row's last token and after each drafted one."""
        counts = np.zeros(len(self._rows), np.int64)
        counts[list(trees)] = [1 + len(tree) for tree in trees.values()]
        tokens = np.zeros((len(self._rows), int(counts.max())), np.int64)
        for i, tree in trees.items():
            tokens[i, : counts[i]] = [self._rows[i].tokens[-1], *tree.tokens]
        lengths = None if (counts == tokens.shape[1]).all() else counts
        if not branches:
            self._computed = None if self._guard is None else self._session.computed(counts)
            return self._session.run(tokens, lengths, here=False)
        seen = np.tile(np.eye(tokens.shape[1], dtype=np.bool_), (len(self._rows), 1, 1))
        for i, tree in trees.items():
            seen[i, : counts[i], : counts[i]] = tree.mask
        return self._session.guess(tokens, seen, lengths, here=False)

    def _judged(self, i: int, tree: Tree, logits: Logits) -> list[int]:
        """Let a row take what stands, up to its end; the columns of the call that it then holds."""
        row, before = self._rows[i], len(self._rows[i].tokens)
        if not len(tree):  # other rows have one
            verdict = Verdict((), row.pick(logits[0]))
            self._observe(i, tree, verdict, logits)
            row.accept(verdict.token, logits[0])
            return [0]
        target = Target(tree, logits, row.seen, row.sampler)
        verdict = self._rule(target, self._chances[i])
        if verdict.token < logits.shape[1]:
            self._observe(i, tree, verdict, logits)
        row.accept_all(target.taken(verdict))
        taken = len(row.tokens) - before
        stood = min(len(verdict.path), taken)
        levels = int(tree.depths.max())
        self._paces.observe(i, levels, stood)
        row.drafts[levels, stood] += 1
        self._drafts.append((levels, stood))
        self._most = max(self._most, len(tree))
        row.drafting.update(rounds=1, drafted=len(tree), accepted=stood)
        return [0, *(node + 1 for node in verdict.path)][:taken]

    def _observe(self, i: int, tree: Tree, verdict: Verdict, logits: Logits) -> None:
        """Tell the drafters, whose time it is."""
        start = self._time()
        self._drafters.observe(i, tree, verdict, logits)
        self._drafting += self._time() - start

    def _time(self) -> float:
        """Seconds, for what the drafters take: calls of a model, or what the host does beside."""
        return clock.now() if self._drafters.draft_cost else clock.host_now()

    def _weigh(
        self, kept_columns: dict[int, list[int]], back: bool, drafting: float, seconds: float
    ) -> None:
        """Tell the guard what the round gave in these seconds; `drafting`: the drafters' time, the call's being 1."""
        if self._guard is None:
            return
        taken = [len(columns) for columns in kept_columns.values()]
        again = max(taken) if back and not self._session.capabilities.free_drafts else 0
        given = sum(taken) / len(taken), self._drafts, again, drafting, seconds
        self._guard.observe(*given, self._most, self._computed)
