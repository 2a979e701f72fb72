"""Jacobi decoding (arXiv:2305.10427): a block of guesses is run again and again, each time replaced by what the model
says of it, until nothing changes. Models that were tuned for it (arXiv:2403.00835) get there sooner.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from accel.ir.axis import option
from accel.runtime.call import Logits
from accel.runtime.decode.context import DecodeContext
from accel.runtime.decode.rounds import Rounds
from accel.runtime.decode.row import Row
from accel.runtime.draft import Base as DraftBase
from accel.runtime.draft import Drafter
from accel.runtime.inputs.ints import Ints
from accel.runtime.length.fixed import Fixed
from accel.runtime.loop import Base
from accel.runtime.loop.speculative import DRAFTS_RELY, Speculative
from accel.runtime.session.session import Session
from accel.runtime.tree import NONE, Tree
from accel.runtime.verify import Verdict
from accel.runtime.verify.sample_match import SampleMatch


@dataclass(frozen=True)
class Jacobi(Base):
    """A block is the newest token and `block` - 1 guesses, at first random tokens of the prompt. A call runs all that
    is not accepted yet. The guesses that are what plain decoding would give are accepted, with the token after them;
    the model's likeliest tokens replace the others. So a block takes at most `block` calls, and `block` = 1 is
    `autoregressive`. The output is that of plain decoding, also when sampling.
    """

    block: int = option(16, least=1, most=256)

    grade = "lossless"
    relies = DRAFTS_RELY
    weighs = True

    def rounds(self, session: Session, rows: Sequence[Row], context: DecodeContext) -> Rounds:
        methods = {
            "draft": _Blocks(self.block - 1),
            "verify": SampleMatch(),
            "length": Fixed(max(1, self.block - 1)),
        }
        return Speculative().rounds(session, rows, replace(context, methods=methods))


@dataclass(frozen=True)
class _Blocks(DraftBase):
    """Guesses that follow the first token of a block."""

    guesses: int

    def begin(self, prompt: Ints, store: Any = None) -> Drafter:
        return _Block(prompt, self.guesses)


class _Block(Drafter):
    """Of one row. `_guesses` [n]: those of its block that were not accepted; None: the newest token begins another."""

    free = False  # a call says what its next guesses are

    def __init__(self, prompt: Ints, size: int):
        self._prompt, self._size = prompt, size
        self._draw = np.random.default_rng(0)  # what is guessed changes no token that comes
        self._guesses: Ints | None = None
        self._at = 0  # tokens of the row that the guesses follow

    def draft(self, seen: Ints, limit: int) -> Tree:
        if self._guesses is None or self._at != seen.size:
            self._guesses = self._draw.choice(self._prompt, self._size)
            self._at = seen.size
        return Tree.chain(self._guesses[:limit]) if self._guesses.size else NONE

    def observe(self, tree: Tree, verdict: Verdict, logits: Logits) -> None:
        """Guesses that no call ran stay as they are."""
        stood, ran = len(verdict.path), len(logits) - 1
        self._at += stood + 1
        if self._guesses is None or stood == self._guesses.size:
            self._guesses = None
        else:
            said: Ints = logits[stood + 1 : ran].argmax(1)
            self._guesses = np.concatenate([said, self._guesses[max(ran, stood + 1) :]])
