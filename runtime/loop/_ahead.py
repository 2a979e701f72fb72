"""The base of loops over a causal cache that guess a block of masks at once: the block sees what is cached and itself,
both ways, and nothing of it is held; tokens are held once they ran causally.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from accel.ir.axis import option
from accel.ir.errors import InputError
from accel.ir.facts import Facts
from accel.ir.invariants import Invariant
from accel.runtime.canvas import Mask
from accel.runtime.decode.context import DecodeContext
from accel.runtime.decode.prompts import prompted
from accel.runtime.decode.row import Row
from accel.runtime.inputs.ints import Ints
from accel.runtime.loop import Base, check_rows
from accel.runtime.loop._canvas import Floats, Guess, Place
from accel.runtime.session.core import CHUNK
from accel.runtime.session.session import Session

NONE = np.zeros(0, np.int64)


@dataclass(frozen=True, eq=False)
class Window:
    """Tokens [K] that see each other, or with `causal` those of them before, and the first `after` of those that the
    call runs; they lie behind these.
    """

    after: int
    ids: Ints
    causal: bool = False


@dataclass(frozen=True, eq=False)
class Ask:
    """What a call runs of a row: tokens in order that follow what the session holds, and windows that see some."""

    run: Ints
    windows: Sequence[Window] = ()

    @property
    def size(self) -> int:
        """Tokens of the call."""
        return int(self.run.size) + sum(window.ids.size for window in self.windows)


@dataclass(frozen=True, eq=False)
class Said:
    """The logits of an `Ask`: of its tokens in order [N,V], and of each window [K,V]."""

    run: Floats
    windows: Sequence[Floats]


@dataclass
class Line:
    """A row as it is decoded. `cached`: tokens of it that the session holds. `ids`, `open` [n]: the block that it is
    at, and which of that are masks; None: it is between blocks. `at`: tokens of the row before the block, `step`: calls
    of it. `context`: most tokens of a row, those of a call included.
    """

    row: Row
    mask: int
    size: int  # of a block
    context: int
    cached: int = 0
    ids: Ints | None = None
    open: Mask = field(default_factory=lambda: np.zeros(0, np.bool_))
    at: int = 0
    step: int = 0
    first: Floats | None = (
        None  # logits [V] of the block's first token, where no mask's row says it
    )
    draft: Ints = field(default_factory=lambda: NONE)  # tokens that may follow the row

    @property
    def most(self) -> int:
        """Tokens that a call may have."""
        return min(CHUNK, self.context - self.cached)

    @property
    def pending(self) -> Ints:
        """Tokens of the row that have not run."""
        return self.row.seen[self.cached :]

    def begin(self, masks: int) -> Ints:
        """A block of masks behind the row's tokens."""
        self.ids, self.open = np.full(masks, self.mask), np.ones(masks, np.bool_)
        self.at, self.step = self.row.seen.size, 0
        return self.ids

    def guess(self, logits: Floats, hidden: Mask | None = None) -> Guess:
        """What logits [n,V] say of the tokens behind `at`, of those that are `hidden` [n] (None: all). No guess is the
        mask; samplers see the tokens up to the first that is hidden.
        """
        slots = np.arange(len(logits)) if hidden is None else np.flatnonzero(hidden)
        scores = logits[slots].copy()
        scores[:, self.mask] = -np.inf
        tokens = self.row.sampler.choices(scores)
        if tokens is None:
            seen = self.row.seen
            tokens = np.array([self.row.sampler(s, seen, self.row.rng) for s in scores], np.int64)
        return Guess.of(self.at + slots, tokens, scores)

    @property
    def place(self) -> Place:
        """Where the row is, for a rule that says which guesses stay."""
        start = self.row.prompt.size
        answer = len(self.row.tokens) + self.row.left
        return Place(
            self.step, self.open.size, self.open.copy(), self.at, self.at - start, answer, None, self.row.rng
        )  # fmt: skip


@dataclass(frozen=True)
class Ahead(Base):
    """Models that are causal and were trained to fill masks behind a text (`facts.blocks`). `block`: tokens of a block;
    0: as many as the model was trained with. `mask`: the id of the mask; -1: the model's own.
    """

    block: int = option(0, least=0, most=256)
    mask: int = option(-1, least=-1)

    blocks: ClassVar[bool] = True
    tuning: ClassVar[str] = "set-block"  # what makes a model for it
    trees = True
    relies = frozenset({Invariant.DECODE_WIDTH, Invariant.REWIND, Invariant.TEXT_PROMPT})
    small: ClassVar[Mapping[str, Any]] = {"block": 4, "mask": 3}

    @property
    def grade(self) -> str:
        return "lossless" if self.block == 1 else "approximate"

    def unfit(self, facts: Facts) -> str:
        if facts.blocks is not None or (self.mask >= 0 and self.block):
            return ""
        return (
            "was not trained to fill blocks of masks behind a text (config.mask_token_id, config.logit_shift = true "
            "and config.block_size of a causal model say so); give such a model (accel-compile train "
            f"{self.tuning} makes one), or give loop.mask and loop.block"
        )

    def tokens(
        self, session: Session, rows: list[Row], context: DecodeContext
    ) -> Iterator[tuple[int, int]]:
        if all(row.finish for row in rows):
            return
        if not session.capabilities.trees:
            raise InputError(
                f"loop = {self.use} guesses blocks that see both ways, and this model takes no guesses "
                "(capabilities.trees); build it with this loop"
            )
        mask, size = self._kind(session, context)
        lines = [Line(row, mask, size, session.max_context) for row in rows]
        try:
            yield from self._started(session, lines)
            while asks := {
                i: self.ask(line) for i, line in enumerate(lines) if not line.row.finish
            }:
                yield from self._round(session, lines, asks)
                check_rows(rows)
        finally:
            with suppress(InputError):  # of a session that a failed call closed
                most = [row.prompt.size + max(0, len(row.tokens) - 1) for row in rows]
                session.rewind(np.minimum(most, session.lengths))

    def _kind(self, session: Session, context: DecodeContext) -> tuple[int, int]:
        """The mask and the size of blocks. Raises InputError."""
        found = None if context.model is None else context.model.facts.blocks
        mask = self.mask if self.mask >= 0 else -1 if found is None else found.mask
        size = self.block or (0 if found is None else found.size)
        if not size or not 0 <= mask < session.vocab_size:
            raise InputError(
                f"loop = {self.use} has the mask {mask} and blocks of {size} tokens; give loop.mask, of "
                f"0..{session.vocab_size - 1}, and loop.block, or a model whose configuration names both"
            )
        return mask, size

    def _started(self, session: Session, lines: list[Line]) -> Iterator[tuple[int, int]]:
        """Run the prompts, and let each row take the token that follows."""
        rows = [line.row for line in lines]
        live = [i for i, row in enumerate(rows) if not row.finish]
        logits = prompted(session, rows)
        for i in live:
            row, lines[i].cached = rows[i], rows[i].prompt.size
            try:
                row.accept(row.pick(logits[i, 0]), logits[i, 0])
            except Exception as error:
                row.fail(error)
            else:
                yield i, row.tokens[-1]
        check_rows(rows)

    def _round(
        self, session: Session, lines: list[Line], asks: Mapping[int, Ask]
    ) -> Iterator[tuple[int, int]]:
        """One call; what rows take of it."""
        said, came = look(session, asks), []
        paths = [NONE] * len(lines)
        for i, ask in asks.items():
            row, before = lines[i].row, len(lines[i].row.tokens)
            try:
                kept = self.read(lines[i], ask, said[i])
            except Exception as error:
                row.fail(error)
            else:
                paths[i] = np.arange(kept)
                lines[i].cached += kept
            came += [(i, token) for token in row.tokens[before:]]
        session.keep(paths)
        yield from came

    @abstractmethod
    def ask(self, line: Line) -> Ask:
        """What the next call runs of a row that goes on."""

    @abstractmethod
    def read(self, line: Line, ask: Ask, said: Said) -> int:
        """Let a row take what a call says of it; how many of the tokens that it ran in order are held from now on."""


@dataclass(frozen=True)
class Filling(Ahead):
    """A block is filled over several calls, in any order; tokens come when all before them are known."""

    @abstractmethod
    def stays(self, guess: Guess, place: Place) -> Any:
        """The places, in a guess of a block's masks, of the tokens that stay: one or more."""

    def fill(self, line: Line, logits: Floats) -> None:
        """Let tokens of a block stay, by logits [n,V] of its slots, and the row take those up to the first mask."""
        assert line.ids is not None
        guess = line.guess(logits, line.open)
        chosen = self.stays(guess, line.place)
        slots = guess.slots[chosen] - line.at
        line.ids[slots], line.open[slots] = guess.tokens[chosen], False
        line.step += 1
        row, whole = line.row, int(line.open.argmax()) if line.open.any() else line.open.size
        for token in line.ids[row.seen.size - line.at : whole].tolist():
            row.accept(token, None)
            if row.finish:
                return
        if whole == line.open.size:
            line.ids = None


def look(session: Session, asks: Mapping[int, Ask]) -> dict[int, Said]:
    """One call of what is asked of each row, of which tokens in order may be kept; what it says."""
    width = max(ask.size for ask in asks.values())
    tokens = np.zeros((session.batch, width), np.int64)
    seen = np.repeat(np.eye(width, dtype=np.bool_)[None], session.batch, 0)
    places, counts = np.zeros_like(tokens), np.zeros(session.batch, np.int64)
    for i, ask in asks.items():
        at = ask.run.size
        tokens[i, :at], places[i, :at] = ask.run, np.arange(at)
        seen[i, :at, :at] = np.tri(at, dtype=np.bool_)
        for window in ask.windows:
            part = slice(at, at + window.ids.size)
            tokens[i, part] = window.ids
            places[i, part] = window.after + np.arange(window.ids.size)
            seen[i, part, : window.after] = True
            seen[i, part, part] = np.tri(window.ids.size) if window.causal else True
            at = part.stop
        counts[i] = at
    positions = session.lengths[:, None] + places
    logits = session.guess(tokens, seen, counts, positions=positions)
    found = {}
    for i, ask in asks.items():
        ends = np.cumsum([ask.run.size, *(window.ids.size for window in ask.windows)])
        run, *windows = np.split(logits[i, : ends[-1]], ends[:-1])
        found[i] = Said(run, windows)
    return found
