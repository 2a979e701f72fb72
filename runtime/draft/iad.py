"""Input-guided aggressive decoding (arXiv:2205.10350): while the output copies the input, as in edits, draft
the next input tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from accel.ir.axis import option
from accel.runtime.draft import Base, Drafter
from accel.runtime.inputs.ints import Ints
from accel.runtime.tree import NONE, Tree


@dataclass(frozen=True)
class Iad(Base):
    """The input is the prompt. The position in it is the unique occurrence of the newest token, or else of
    the newest two, up to `ngram` tokens; otherwise there is no draft.
    """

    ngram: int = option(3, least=1)

    def begin(self, prompt: Ints, store: Any = None) -> Drafter:
        order = np.argsort(prompt, kind="stable")
        return _Aligned(self.ngram, prompt, order, prompt[order])


@dataclass(frozen=True, eq=False)
class _Aligned(Drafter):
    """order [n]: the prompt's places by their tokens, which are `ranked` [n]."""

    ngram: int
    source: Ints
    order: Ints
    ranked: Ints

    def draft(self, seen: Ints, limit: int) -> Tree:
        first, end = self.ranked.searchsorted([seen[-1], seen[-1] + 1])
        found = self.order[first:end]
        for back in range(1, min(self.ngram, seen.size)):
            if found.size < 2:
                break
            found = found[found >= back]
            found = found[self.source[found - back] == seen[-1 - back]]
        return (
            Tree.chain(self.source[found[0] + 1 : found[0] + 1 + limit])
            if found.size == 1
            else NONE
        )
