"""The base of loops that fill masks block by block (arXiv:2502.09992)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from accel.ir.axis import option
from accel.ir.facts import Facts
from accel.ir.invariants import Invariant
from accel.runtime.decode.context import DecodeContext
from accel.runtime.decode.row import Row
from accel.runtime.loop import Base
from accel.runtime.loop._canvas import Canvas, Guess, Place
from accel.runtime.session.session import Session


@dataclass(frozen=True)
class Blocks(Base):
    """A row is its prompt, then mask tokens for the whole answer; blocks of `block` slots are unmasked from
    left to right.

    A call gives a token and its confidence for each mask; the method selects the tokens to keep, which do
    not change again.
    Tokens are emitted when all tokens before them are known. What a call computes, and what it reads from the cache,
    is up to the method of `canvas`.
    """

    block: int = option(32, least=1)

    asks = {"canvas": "whole"}
    weighs = False
    rest: ClassVar[bool] = False  # whether calls are asked of the masks behind the block
    masked_diffusion = True
    breaks = frozenset({Invariant.APPEND_ONLY})

    def unfit(self, facts: Facts) -> str:
        if facts.paths is not None:
            return "gives a graph of tokens, and fills no masks; give loop = da-transformer"
        if facts.diffusion is not None and facts.diffusion.mask is None:
            return "has no mask token (config.mask_token_id); give loop = ut5"
        return ""

    @property
    def grade(self) -> str:
        """Whether tokens are those of one token per call, of what calls compute."""
        return "lossless" if self.static else "approximate"

    @property
    def ways(self) -> int:
        """Rows of the session that decode each row."""
        return 1

    @property
    def static(self) -> bool:
        """Whether what stays is what would stay of one token per call."""
        return False

    def tokens(
        self, session: Session, rows: list[Row], context: DecodeContext
    ) -> Iterator[tuple[int, int]]:
        if all(row.finish for row in rows):
            return
        canvas = self.opened(session, rows, context)
        try:
            while canvas.advance():
                yield from self.fill(canvas)
        finally:
            canvas.close()

    def opened(self, session: Session, rows: list[Row], context: DecodeContext) -> Canvas:
        """The rows as masks and blocks. Raises InputError where the session's model fills no masks."""
        memory = [self.begin(row) for row in rows]
        return Canvas(session, rows, self.block, context.methods["canvas"], self.ways, memory)

    def fill(self, canvas: Canvas) -> Iterator[tuple[int, int]]:
        """Fill the block that each row is at: (row, token) of all that is certain, as it comes."""
        step, total = 0, canvas.counts
        while canvas.waiting.any():
            for i, guess in canvas.look(self.rest).items():
                place = canvas.place(i, step, int(total[i]))
                if self.ends(guess, place):
                    canvas.commit(i, guess, slice(None))
                    continue
                block = guess.before(canvas.last[i])
                stays = self.stays(block, place)
                canvas.commit(i, block, stays)
                if (end := self.cuts(block, stays, place)) is not None:
                    canvas.cut(i, end)
            step += 1
            yield from canvas.take()

    def begin(self, row: Row) -> Any:
        """What the method keeps of a row from call to call, in `Place.memory`."""
        return None

    @abstractmethod
    def stays(self, guess: Guess, place: Place) -> Any:
        """The places, in a guess of a block's masks, of the tokens that stay: one or more."""

    def ends(self, guess: Guess, place: Place) -> bool:
        """Whether all that a call says of a row stays. Of a loop with `rest` the guess holds the masks behind the block
        too, where the call sees them anew.
        """
        return False

    def cuts(self, guess: Guess, places: Any, place: Place) -> int | None:
        """The slot where the row ends from here on, once what a guess has at these places stays: a token that ends the
        row is before it. None: where it did.
        """
        return None


def share(total: int, steps: int, step: int) -> int:
    """How many of `total` masks are filled in a step of `steps`, so that all are after the last."""
    return total // steps + (step < total % steps)


def surest(guess: Guess, chosen: Any) -> Any:
    """The places of what is `chosen` [n], and of the surest."""
    stays = chosen.copy()
    stays[guess.first(1)] = True
    return np.flatnonzero(stays)
