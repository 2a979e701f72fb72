"""Prompt lookup decoding (github.com/apoorvumang/prompt-lookup-decoding): draft the tokens after an earlier
occurrence of the newest tokens, in the prompt or the output.
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
class PromptLookup(Base, Drafter):
    """Searches for the newest `ngram` tokens, then for fewer, down to one; the first occurrence is used, as in
    transformers.
    """

    ngram: int = option(2, least=1)

    def begin(self, prompt: Ints, store: Any = None) -> Drafter:
        return self

    def draft(self, seen: Ints, limit: int) -> Tree:
        for size in range(min(self.ngram, seen.size - 1), 0, -1):
            found = ends(seen[:-1], seen[-size:])
            if found.size:
                return Tree.chain(seen[found[0] : found[0] + limit])
        return NONE


def ends(tokens: Ints, tail: Ints) -> Ints:
    """The index behind each occurrence of tail [n], n >= 1, in tokens [m], in rising order."""
    if tail.size > tokens.size:
        return np.zeros(0, np.int64)
    last = np.flatnonzero(
        tokens[tail.size - 1 :] == tail[-1]
    )  # of most tails nothing else has to be compared
    for back in range(1, tail.size):
        last = last[tokens[last + tail.size - 1 - back] == tail[-1 - back]]
    return last + tail.size
