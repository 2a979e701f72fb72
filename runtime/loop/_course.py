"""Searches that are written from beginning to end: they ask for calls, and go on when these have run."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field

import numpy as np

from accel.ir.errors import InputError
from accel.runtime.call import Logits
from accel.runtime.decode.context import DecodeContext
from accel.runtime.decode.row import Row
from accel.runtime.inputs.text import Tokenizer
from accel.runtime.loop._branches import BeamGroup

Calls = Generator["Turn", None, None]


@dataclass(eq=False)
class Way:
    """A text that a search goes on with. `after`: the logits [V] behind its tokens, None where the last one is still to
    be run; `before`: those that its last token was taken from; `logs`: the log-probability of each token by the model;
    `stuck`: why nothing may follow; `lines` [k,V]: the logits behind each token that the last call ran of it, of a
    group that `reads`; `likeliest`: it takes the likeliest tokens, whatever the request's temperature.
    """

    row: Row
    after: Logits | None = None
    logs: list[float] = field(default_factory=list)
    stuck: InputError | None = None
    lines: Logits | None = None
    before: Logits | None = None
    likeliest: bool = False
    place: tuple[int, int] = (0, 0)  # the turn, and its number among the rows then

    def branch(self, rng: np.random.Generator | None = None) -> Way:
        """Another that goes on from here by itself, with random numbers of its own where they are given."""
        row = self.row.branch(rng)
        return Way(row, self.after, list(self.logs), place=self.place)

    def ways(self, count: int) -> list[Way]:
        """So many that go on from here: the first draws as this one would; of a greedy one there is no other."""
        if self.row.sampler.greedy:
            count = 1
        return [self.branch(), *(self.branch(rng) for rng in self.row.rng.spawn(count - 1))]

    def pick(self) -> None:
        """Take the next token, of known logits; `stuck` where the request lets none follow."""
        assert self.after is not None
        try:
            token = self._choice(self.after)
            self.row.accept(token, self.after)
        except InputError as error:
            self.stuck = error
            return
        self.logs.append(log_of(self.after, token))
        self.before, self.after = self.after, None

    def _choice(self, logits: Logits) -> int:
        if self.likeliest:
            return int(self.row.sampler.scores(logits, self.row.seen).argmax())
        return self.row.pick(logits)

    def mean(self, start: int = 0) -> float:
        """The mean log-probability of its tokens from `start` on; 0 of none."""
        return float(np.mean(self.logs[start:])) if len(self.logs) > start else 0.0

    @property
    def ended(self) -> bool:
        return bool(self.row.finish)


@dataclass
class Turn:
    """A call: the ways whose last tokens run, and those that wait beside them, so that nothing runs again for them."""

    runs: Sequence[Way]
    waits: Sequence[Way] = ()


class Course(BeamGroup):
    """A search of one prompt that `search` writes down."""

    def __init__(self, row: Row, context: DecodeContext):
        super().__init__(row)
        self.context = context
        self._first = Way(self.branches[0])
        self._ways, self._turn = [self._first], 0
        self._plan: Generator[Turn, None, Row] | None = None

    @abstractmethod
    def search(self, way: Way) -> Generator[Turn, None, Row]:
        """Go on from `way`, behind the prompt, whose `after` is known: asks for calls, and returns the answer. After a
        call each way that ran has `after`. A way that neither ran nor waited may come again: what it has in common with
        another one is kept, and the rest is run.
        """

    @property
    def tokenizer(self) -> Tokenizer:
        """Of a loop whose `check` wants one."""
        assert self.context.model is not None and self.context.model.tokenizer is not None
        return self.context.model.tokenizer

    def text(self, way: Way) -> str:
        """What it has written."""
        tokens = way.row.tokens[:-1] if way.row.finish == "eos" else way.row.tokens
        return self.tokenizer.decode(tokens)

    def scores(self, ways: Sequence[Way]) -> list[float] | None:
        """What the request's scorer says of texts, all of them in one call; None where there is none."""
        if self.context.scorer is None or not ways:
            return None
        prompt = self.tokenizer.decode(ways[0].row.prompt_text.tolist())
        return self.context.scorer(prompt, [self.text(way) for way in ways])

    def write(
        self, ways: Sequence[Way], most: int, until: str = "", waits: Sequence[Way] = ()
    ) -> Calls:
        """Let each way write up to `most` tokens, or to its end, or up to a text `until` behind some other text; the
        others wait, and `waits` beside them.
        """
        pens = [_Pen(way, most, until, self.tokenizer if until else None) for way in ways]
        while True:
            for pen in pens:
                pen.write()
            runs = [pen.way for pen in pens if not pen.done and not pen.way.stuck]
            if not runs:
                return
            yield Turn(runs, [*waits, *(way for way in ways if way not in runs and not way.stuck)])

    def step(self, logits: Logits) -> list[int]:
        for n, way in enumerate(self._ways):
            if n not in self.waits:
                way.after = logits[n].copy()
                way.lines = self.lines[n].copy() if self.lines else None
        if self._plan is None:
            self._plan = self.search(self._first)
        try:
            turn = next(self._plan)
        except StopIteration as end:
            self.best = end.value
            return [0]
        ways = [*turn.runs, *turn.waits]
        parents = [self._parent(way) for way in ways]
        self._turn += 1
        for n, way in enumerate(ways):
            way.place = (self._turn, n)
        self._ways, self.branches = ways, [way.row for way in ways]
        self.waits = frozenset(range(len(turn.runs), len(ways)))
        return parents

    def _parent(self, way: Way) -> int:
        """The row that it goes on from: its own, or the one with which it has most in common."""
        turn, place = way.place
        if turn == self._turn:
            return place
        seen, found = way.row.seen, list[int]()
        for branch in self.branches:
            both = min(branch.seen.size, seen.size)
            differ = np.flatnonzero(branch.seen[:both] != seen[:both])
            found.append(int(differ[0]) if differ.size else both)
        return int(np.argmax(found))


class _Pen:
    """A way that writes a part of its text."""

    def __init__(self, way: Way, most: int, until: str, tokenizer: Tokenizer | None):
        self.way, self._left, self._until = way, most, until
        self._stream, self._text = tokenizer.stream() if tokenizer else None, ""

    @property
    def done(self) -> bool:
        whole = bool(self._until) and self._until in self._text
        return whole or not self._left or self.way.ended

    def write(self) -> None:
        """Take the next token where the logits are there."""
        if self.done or self.way.stuck or self.way.after is None:
            return
        self.way.pick()
        if self.way.stuck:
            return
        self._left -= 1
        if self._stream is not None:  # blanks before a step end none
            self._text = (self._text + self._stream.push(self.way.row.tokens[-1])).lstrip()


def log_of(logits: Logits, token: int) -> float:
    """The log-probability of a token by logits [V]."""
    line = logits.astype(np.float64)
    line -= line.max()
    return float(line[token] - np.log(np.exp(line).sum()))


def usable(ways: Sequence[Way]) -> list[Way]:
    """Those that something may follow, or that have ended. Raises the first one's error where there is none."""
    found = [way for way in ways if way.stuck is None]
    if not found and ways[0].stuck is not None:
        raise ways[0].stuck
    return found
