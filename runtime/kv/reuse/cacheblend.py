"""CacheBlend (arXiv:2405.16444): chunks that were computed before are reused anywhere in a prompt, and the tokens that
deviate most from their stored keys and values are computed again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from accel.runtime.inputs.ints import Bools
from accel.runtime.kv.reuse._pieces import Floats, Pieces, best
from accel.runtime.kv.reuse._store import Piece, cover


@dataclass(frozen=True)
class CacheBlend(Pieces):
    """Chunks may come from any stored prompts, those that were prefilled alone among them. The first layers up to
    `layer` run all tokens. A `ratio` of the reused tokens, those that deviate most there, and all others run on.

    The tokens are chosen once, as in the released code; the paper narrows them from layer to layer.
    """

    lacks = "narrowing the chosen tokens from layer to layer"

    def pieces(self, matches: Sequence[Piece]) -> list[Piece]:
        return cover(matches, self.least)

    def stale(self, deviation: Floats, drawn: Floats) -> Bools:
        return best(deviation, self.ratio)
