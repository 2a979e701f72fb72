"""Next sequence prediction (Sequential Diffusion Language Models, arXiv:2509.24007): of the tokens that a window of
masks gives, the longest sure beginning is taken.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from accel.ir.axis import option
from accel.runtime.loop._ahead import NONE, Ahead, Ask, Line, Said, Window


@dataclass(frozen=True)
class Sdlm(Ahead):
    """A call runs the tokens that were taken last, causally, and a window of the newest one and `block` - 1 masks,
    which gives `block` tokens: those up to the first of a probability below `threshold` are taken, and at least one.

    With `checks` the probability decides nothing: the next call runs the tokens causally and a window behind each, and
    takes those that the windows' first rows confirm, and one more; the window there gives the next ones. The tokens are
    then those of one per call. `threshold` above 1 is one token per call; `block` = 1 is `autoregressive`.
    """

    threshold: float = option(0.9)
    checks: bool = option(False)

    def ask(self, line: Line) -> Ask:
        pending, room = line.pending, line.row.left
        fits = (line.most - pending.size - line.size) // (line.size + 1)
        drafts = line.draft[: max(0, min(room - 1, fits))]
        chain = np.concatenate([pending, drafts])
        windows = [
            self._window(line, chain, pending.size + i, room - i) for i in range(drafts.size + 1)
        ]
        return Ask(chain, windows)

    def read(self, line: Line, ask: Ask, said: Said) -> int:
        if self.checks:
            return self._checked(line, ask, said)
        row, line.at = line.row, line.row.seen.size
        guess = line.guess(said.windows[0])
        unsure = np.flatnonzero(guess.sure < self.threshold)
        count = max(1, int(unsure[0])) if unsure.size else len(guess)
        for token in guess.tokens[:count].tolist():
            row.accept(token, None)
            if row.finish:
                break
        return int(ask.run.size)

    def _checked(self, line: Line, ask: Ask, said: Said) -> int:
        """Take drafts that come again, and what comes in the place of the first that does not."""
        row, drafts = line.row, ask.run[line.pending.size :]
        kept, line.draft = line.pending.size, NONE
        for i, window in enumerate(said.windows):
            line.at = row.seen.size
            (token,) = line.guess(window[:1]).tokens.tolist()
            row.accept(token, None)
            if row.finish:
                break
            if i == drafts.size or token != drafts[i]:
                behind = window[1:].copy()
                behind[:, line.mask] = -np.inf
                line.draft = behind.argmax(1)
                break
            kept += 1
        return int(kept)

    @staticmethod
    def _window(line: Line, chain: np.ndarray, after: int, room: int) -> Window:
        """A window on the token before place `after` of a chain, which it has as its own first."""
        ids = np.full(min(line.size, room), line.mask)
        ids[0] = chain[after - 1]
        return Window(after - 1, ids)
