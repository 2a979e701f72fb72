"""Lookahead decoding (arXiv:2402.02057): each call also generates n-grams by Jacobi iteration, and verifies
the stored n-grams that begin with the newest token.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, Self

import numpy as np

from accel.ir.axis import option
from accel.ir.errors import InputError, RecipeError
from accel.runtime.backends import clock
from accel.runtime.call import Logits
from accel.runtime.decode.context import DecodeContext
from accel.runtime.decode.rounds import Rounds, begin_figures, picked
from accel.runtime.decode.row import Row
from accel.runtime.inputs.ints import Bools, Ints
from accel.runtime.loop import Base
from accel.runtime.loop.speculative import DRAFTS_RELY
from accel.runtime.session.core import CHUNK
from accel.runtime.session.session import Session
from accel.runtime.speculation.guard import Guard
from accel.runtime.tree import Tree
from accel.runtime.verify import Chance, Target, match


@dataclass(frozen=True)
class Lookahead(Base):
    """A call contains the last token; the lookahead window, `window` columns and `ngram` - 1 rows, each row
    the model's output for
    the row before; and up to `guesses` n-grams that begin with the last token, of which the tokens that
    plain decoding would give are accepted. The n-grams of a row come from its prompt, its output and its window.
    """

    # a processor, to which tokens of a call are not free, gains by no more than one (docs/figures)
    window: int = option(1, least=1, most=256)
    ngram: int = option(5, least=2, most=32)
    guesses: int = option(1, least=1, most=256)

    grade = "lossless"
    trees = True
    relies = DRAFTS_RELY
    small: ClassVar[Mapping[str, Any]] = {"ngram": 3}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.widest > CHUNK:
            raise RecipeError(
                f"{self.full_name}: window = {self.window}, ngram = {self.ngram} and guesses = {self.guesses} need "
                f"calls of up to {self.widest} tokens; give smaller ones, for up to {CHUNK}"
            )

    @property
    def widest(self) -> int:
        """Most tokens of a call."""
        rows = self.ngram - 1
        return self.guesses * rows + max(
            n * (self.window + rows - n) for n in range(1, rows + 1)
        )  # while it fills

    def rounds(self, session: Session, rows: Sequence[Row], context: DecodeContext) -> Rounds:
        wide = session.capabilities.width
        if wide is not None and wide < self.widest:
            raise InputError(
                f"loop.lookahead: window = {self.window}, ngram = {self.ngram} and guesses = {self.guesses} need "
                f"calls of up to {self.widest} tokens, but this model gives exact results only up to "
                f"{wide} (session.capabilities); build with smaller values"
            )
        return _Rounds(session, rows, self, context)


class _Rounds(Rounds):
    joins = True

    def __init__(
        self, session: Session, rows: Sequence[Row], method: Lookahead, context: DecodeContext
    ):
        super().__init__(session, rows)
        self._method = method
        self._windows = [_Window(row, method) for row in rows]
        self._chances = [Chance(row.rng) for row in rows]
        self._guard = None if context.costs is None else Guard(context.costs, session.batch)
        begin_figures(rows)

    @property
    def widest(self) -> int:
        return self._method.ngram

    def joined(self, other: Self) -> None:
        self._windows += other._windows
        self._chances += other._chances
        if self._guard is not None:
            self._guard.of_batch(self._session.batch)

    def left(self, order: Ints) -> None:
        self._windows = picked(self._windows, order)
        self._chances = picked(self._chances, order)
        if self._guard is not None:
            self._guard.of_batch(self._session.batch)

    def run(self) -> list[tuple[int, int]]:
        live, rows = self.live, self._rows
        size = self._method.widest - 1
        rests = self._guard is not None and not self._guard.affords(size, self._method.ngram - 1)
        start = clock.now()
        calls = {} if rests else {i: self._windows[i].call(rows[i]) for i in live}
        room = np.minimum(self._session.max_context - self._session.lengths, self._session.room)
        if not calls or any(call.tokens.size > room[i] for i, call in calls.items()):
            return self._plain(live, rests)
        before = {i: len(rows[i].tokens) for i in live}
        called = clock.now()
        logits, paths = self._guessed(calls), [np.zeros(0, np.int64) for _ in rows]
        spent = clock.now() - called
        try:
            for i, call in calls.items():
                try:
                    paths[i] = self._judged(i, call, logits[i])
                except Exception as error:
                    rows[i].fail(error)
        finally:  # what was judged stands, even where it is interrupted
            self._session.keep(paths)
        calls = {i: call for i, call in calls.items() if rows[i].error is None}
        if self._guard is not None and calls:
            stood = [(call.tokens.size - 1, paths[i].size - 1) for i, call in calls.items()]
            self._guard.observe(sum(p.size for p in paths) / len(calls), stood, 0, 0.0)
        rows[0].clock(called - start, spent, clock.now() - start)  # for all
        return [(i, token) for i in live for token in rows[i].tokens[before[i] :]]

    def _plain(self, live: list[int], rests: bool) -> list[tuple[int, int]]:
        """A step without guesses: they do not pay for now, or a row has no room for them."""
        start = clock.now()
        logits = self._call(live)
        spent = clock.now() - start
        taken = list(self._pick(live, logits))
        for i, _ in taken:
            self._windows[i].note(self._rows[i].text, 1)
            self._rows[i].drafting["fallback"] += rests
        if self._guard is not None:
            self._guard.rest()
        self._rows[0].clock(0.0, spent, clock.now() - start)
        return taken

    def _guessed(self, calls: dict[int, _Call]) -> Logits:
        """The logits [B,N,V] of what each row's call asks for."""
        counts = np.zeros(len(self._rows), np.int64)
        counts[list(calls)] = [call.tokens.size for call in calls.values()]
        width = int(counts.max())
        columns = np.zeros(
            (len(self._rows), max(call.columns.size for call in calls.values())), np.int64
        )
        tokens, seen = (
            np.zeros((len(self._rows), width), np.int64),
            np.zeros((len(self._rows), width, width), bool),
        )
        seen[:] = np.eye(width, dtype=bool)
        for i, call in calls.items():
            tokens[i, : counts[i]], seen[i, : counts[i], : counts[i]] = call.tokens, call.mask
            columns[i, : call.columns.size] = call.columns
        return self._session.guess(tokens, seen, counts, columns)

    def _judged(self, i: int, call: _Call, logits: Logits) -> Ints:
        """Let a row take what stands, up to its end; the columns that the session is to hold [n]."""
        row, last, before = (
            self._rows[i],
            call.tokens.size - len(call.tree),
            len(self._rows[i].tokens),
        )
        end = call.columns.size - len(call.tree)
        window, nodes = logits[end - call.grid.shape[1] : end], logits[end : call.columns.size]
        target = Target(call.tree, np.concatenate([logits[:1], nodes]), row.seen, row.sampler)
        verdict = match(target, self._chances[i])
        row.accept_all(target.taken(verdict))
        taken = len(row.tokens) - before
        self._windows[i].learn(call, window)
        self._windows[i].note(row.text, taken)
        if len(call.tree):
            row.drafting.update(
                rounds=1, drafted=len(call.tree), accepted=min(len(verdict.path), taken)
            )
            row.drafts[int(call.tree.depths.max()), min(len(verdict.path), taken)] += 1
        found: Ints = np.concatenate([[0], last + np.array(verdict.path, np.int64)])[:taken]
        return found


@dataclass(frozen=True, eq=False)
class _Call:
    """tokens [T]: the window's grid [R,W], whose first is the last committed token, and a tree of n-grams after that;
    mask [T,T]: which of them each one sees; columns: those whose logits are used: the first, the grid's last row, the
    tree.
    """

    tokens: Ints
    mask: Bools
    grid: Ints
    tree: Tree

    @property
    def columns(self) -> Ints:
        last = self.grid.size - self.grid.shape[1]
        return np.concatenate([[0], np.arange(max(last, 1), self.tokens.size)])


class _Window:
    """Of one row: guesses of the next tokens, and n-grams by their first token, the newest last."""

    def __init__(self, row: Row, method: Lookahead):
        self._method = method
        draw = np.random.default_rng(0)  # what is guessed changes no token that comes
        self._guesses = [
            draw.choice(row.prompt_text, method.window + method.ngram - 3)
        ]  # the first row, behind its first
        self._pool: dict[int, OrderedDict[tuple[int, ...], None]] = defaultdict(OrderedDict)
        self.note(row.text, row.text.size)

    def call(self, row: Row) -> _Call:
        """What the row's next call takes."""
        last, most = row.tokens[-1], min(self._method.ngram, row.left) - 1
        tree = _merged(
            [gram[:most] for gram in reversed(self._pool.get(last, ()))] if most > 0 else ()
        )
        grid = np.stack([np.concatenate([[last], self._guesses[0]]), *self._guesses[1:]])
        mask = np.zeros((grid.size + len(tree),) * 2, bool)
        mask[: grid.size, : grid.size] = _sight(*grid.shape)
        nodes = np.concatenate([[0], np.arange(grid.size, len(mask))])
        mask[np.ix_(nodes, nodes)] |= tree.mask
        return _Call(np.concatenate([grid.ravel(), tree.tokens]), mask, grid, tree)

    def learn(self, call: _Call, logits: Logits) -> None:
        """Take what the model made of the window's last row, `logits` [W,V], as a new row."""
        grid, new = call.grid, logits.argmax(1)
        if len(grid) < self._method.ngram - 1:  # not all rows are there yet
            self._guesses = [self._guesses[0][1:], *(row[1:] for row in self._guesses[1:]), new[1:]]
            return
        rows = [*grid[1:], new]
        for key, *gram in np.stack([grid[0], *rows], axis=1).tolist():
            self._add(key, tuple(gram))
        self._guesses = [rows[0][1:], *rows[1:]]

    def note(self, seen: Ints, new: int) -> None:
        """Of the tokens `seen` [n] the last `new` are new: take the n-grams that they end."""
        size, ids = self._method.ngram, seen[-(new + self._method.ngram - 1) :].tolist()
        for start in range(len(ids) - size + 1):
            self._add(ids[start], tuple(ids[start + 1 : start + size]))

    def _add(self, key: int, gram: tuple[int, ...]) -> None:
        grams = self._pool[key]
        grams.pop(gram, None)
        grams[gram] = None
        if len(grams) > self._method.guesses:
            grams.popitem(last=False)


@cache
def _sight(rows: int, columns: int) -> Bools:
    """What each token of a grid sees of it: the first row up to its column, and its column up to itself."""
    row, column = np.divmod(np.arange(rows * columns), columns)
    first = (row == 0) & (column <= column[:, None])
    found: Bools = first | ((column == column[:, None]) & (row <= row[:, None]))
    return found


def _merged(grams: Sequence[tuple[int, ...]]) -> Tree:
    """A tree of what n-grams begin with alike."""
    nodes: dict[tuple[int, ...], int] = {(): -1}
    tokens, parents = list[int](), list[int]()
    for gram in grams:
        for end in range(1, len(gram) + 1):
            if gram[:end] not in nodes:
                nodes[gram[:end]] = len(tokens)
                tokens.append(gram[end - 1])
                parents.append(nodes[gram[: end - 1]])
    return Tree(np.array(tokens, np.int64), np.array(parents, np.int64))
