"""Lexical unit decoding (arXiv:2405.15208): masks behind the newest token say what follows it, and the longest sure
beginning of that, a lexical unit, is taken at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from accel.ir.axis import option
from accel.runtime.loop._ahead import Ahead, Ask, Line, Said, Window


@dataclass(frozen=True)
class Lud(Ahead):
    """A call runs the tokens that were taken last and `block` - 1 masks, all causally, which gives `block` tokens:
    those up to the first of a probability below `threshold` are taken, and at least one. A token that repeats the one
    before it ends the unit before it, unless it is the first. Nothing checks what was taken; of the masks nothing is
    held.

    `accel-compile train lud MODEL --out DIR` makes a model for it. `threshold` above 1 is plain decoding, as is
    `block` = 1.
    """

    threshold: float = option(0.9)

    @property
    def grade(self) -> str:
        return "lossless" if self.block == 1 or self.threshold > 1 else "approximate"

    def ask(self, line: Line) -> Ask:
        masks = np.full(min(line.size, line.row.left) - 1, line.mask)
        run = line.pending
        return Ask(run, [Window(run.size, masks, causal=True)] if masks.size else [])

    def read(self, line: Line, ask: Ask, said: Said) -> int:
        row, line.at = line.row, line.row.seen.size
        guess = line.guess(np.concatenate([said.run[-1:], *said.windows]))
        ends = guess.sure < self.threshold
        ends[1:] |= guess.tokens[1:] == guess.tokens[:-1]
        count = max(1, int(ends.argmax())) if ends.any() else len(guess)
        for token in guess.tokens[:count].tolist():
            row.accept(token, None)
            if row.finish:
                break
        return int(ask.run.size)
