"""KVShare (arXiv:2503.16525): a prompt takes over what it has in common with the stored one that is most like it.
Tokens that deviate, or that new tokens attend to, are computed again, at the prompt and while tokens are generated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from accel.ir.axis import option
from accel.runtime.inputs.ints import Bools
from accel.runtime.kv.reuse._pieces import Floats, Pieces, best
from accel.runtime.kv.reuse._store import Piece, most_alike


@dataclass(frozen=True)
class KVShare(Pieces):
    """At the prompt, `ratio` of the reused tokens are computed again, those that deviate most, and an `attended` share:
    those that the other tokens of the prompt attend to most at `layer`.

    After it, the `watch` share of the rest that deviate most is watched: where a single token pays more than
    `threshold` of its attention at `layer` to them, the `repairs` of them that it attends to most are computed again
    before it, once each (0: none is). Until all were, such a token takes two graph calls.

    The stored prompt is the one that covers most of the prompt by runs of `least` tokens, found by an index of tokens:
    only equal tokens can be taken over, so a search by meaning would find none that covers more. The paper's scheduler,
    which orders waiting requests by their hits, is the schedule `hit-ratio`.
    """

    attended: float = option(0.05, least=0, most=1)
    watch: float = option(0.16, least=0, most=1)
    threshold: float = option(0.05, least=0, most=1)
    repairs: int = option(4, least=0, most=4096)
    attention: ClassVar[bool] = True

    def pieces(self, matches: Sequence[Piece]) -> list[Piece]:
        return most_alike(matches, self.least)

    def stale(self, deviation: Floats, drawn: Floats) -> Bools:
        first = best(deviation, self.ratio)
        return first | best(np.where(first, -1, drawn), min(self.attended, 1 - self.ratio))

    def watched(self, deviation: Floats) -> Bools:
        return best(deviation, self.watch if self.repairs else 0.0)

    def repaired(self, share: Floats) -> Bools:
        found = np.zeros(share.size, bool)
        if share.sum() > self.threshold:
            found[np.argsort(-share, kind="stable")[: self.repairs]] = True
        return found
