"""Set Block Decoding (arXiv:2509.04185): masks behind a causal cache are filled in any order, as many as may be drawn
apart from each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from accel.ir.axis import option
from accel.runtime.loop._ahead import NONE, Ask, Filling, Line, Said, Window
from accel.runtime.loop._canvas import Guess, Place
from accel.runtime.loop.dllm_eb import DllmEb


@dataclass(frozen=True)
class Sbd(Filling):
    """A block is `block` masks behind the text. Of those that a call runs the most stay, in the order of their entropy,
    whose entropies sum to at most `gamma` nats beside the largest (`dllm-eb`). The tokens of a full block run causally
    in the call of the next block's masks. The first token of a block follows from the text as in plain decoding.

    `accel-compile train set-block MODEL --out DIR` makes a model for it.
    `gamma` = 0 is one token per call, and those of entropy 0; `block` = 1 is `autoregressive`.
    """

    gamma: float = option(0.35, least=0)

    def stays(self, guess: Guess, place: Place) -> Any:
        return DllmEb(gamma=self.gamma).stays(guess, place)

    def ask(self, line: Line) -> Ask:
        if line.ids is not None:
            return Ask(NONE, [Window(0, line.ids)])
        ids = line.begin(min(line.size, line.row.left))
        behind = [Window(line.pending.size, ids)] if ids.size > 1 else []
        return Ask(line.pending, behind)

    def read(self, line: Line, ask: Ask, said: Said) -> int:
        if ask.run.size:
            line.first = said.run[-1]
        assert line.first is not None
        rows = [line.first[None], *(window[:-1] for window in said.windows)]
        self.fill(line, np.concatenate(rows))
        return int(ask.run.size)
