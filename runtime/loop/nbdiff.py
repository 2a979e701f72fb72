"""Block diffusion behind a causal cache (NBDiff, arXiv:2512.06776): the first token of a block follows from the text,
the others are masks that are filled by confidence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from accel.ir.axis import option
from accel.runtime.loop._ahead import NONE, Ask, Filling, Line, Said, Window
from accel.runtime.loop._blocks import surest
from accel.runtime.loop._canvas import Guess, Place


@dataclass(frozen=True)
class Nbdiff(Filling):
    """A block is the newest token and `block` - 1 masks, which a call runs; tokens of a probability above `threshold`
    stay, and always the surest. When no mask is left, one causal call of the block holds it and gives the next token.

    So a block takes as many calls as fill it, and one. `block` = 1 is `autoregressive`.
    """

    threshold: float = option(0.9)

    def stays(self, guess: Guess, place: Place) -> Any:
        return surest(guess, guess.sure > self.threshold)

    def ask(self, line: Line) -> Ask:
        masks = min(line.size - 1, line.row.left)
        if line.ids is None and (line.pending.size > 1 or not masks):
            return Ask(line.pending)
        ids = line.begin(masks) if line.ids is None else line.ids
        return Ask(NONE, [Window(0, np.append(line.row.seen[line.at - 1], ids))])

    def read(self, line: Line, ask: Ask, said: Said) -> int:
        if ask.run.size:
            line.row.accept(line.row.pick(said.run[-1]), said.run[-1])
        else:
            self.fill(line, said.windows[0][:-1])
        return int(ask.run.size)
