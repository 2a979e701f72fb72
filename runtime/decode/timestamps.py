"""Where the times of speech may stand in a text, by the rules of Whisper's decoder (arXiv 2212.04356)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from accel.runtime.call import Logits
from accel.runtime.inputs.ints import Ints


@dataclass(frozen=True)
class Timestamps:
    """Times come in pairs, one at the end of a piece of text and one where the next begins, and never decrease; a text
    begins with one. Where all times together are likelier than any other token, one of them follows.

    zero: the token of time 0; it and those above it are times. end: the token that ends a text; those from it on may
    follow a piece's end. start: the tokens before the first new one. latest: how far above `zero` the first time may
    be; None: anywhere.
    """

    zero: int
    end: int
    start: int
    latest: int | None = None

    def restrict(self, logits: Logits, seen: Ints) -> None:
        """Set those of the logits [V] to -inf that may not follow `seen` [n]."""
        new = seen[self.start :]
        timed = new.size > 0 and new[-1] >= self.zero
        paired = new.size < 2 or new[-2] >= self.zero
        logits[self.zero - 1] = -np.inf  # the token for a text without times
        if timed and paired:
            logits[self.zero :] = -np.inf
        elif timed:
            logits[: self.end] = -np.inf
        times = new[new >= self.zero]
        if times.size:
            again = timed and not paired  # the next piece may begin where the last one ended
            logits[self.zero : int(times[-1]) + (not again)] = -np.inf
        if not new.size:
            logits[: self.zero] = -np.inf
            if self.latest is not None:
                logits[self.zero + self.latest + 1 :] = -np.inf
        most = logits[: self.zero].max()
        likely = logits[self.zero :]
        top = likely.max(initial=-np.inf)
        if np.isfinite(top) and top + np.log(np.exp(likely - top).sum()) > most:
            logits[: self.zero] = -np.inf
