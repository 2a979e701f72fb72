"""Delayed caching of filled slots (dKV-Cache-Decode, arXiv:2505.15781): tokens are cached one call later."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from accel.ir.axis import option
from accel.ir.invariants import Invariant
from accel.runtime.canvas import Base, Mask, Sheet


@dataclass(frozen=True)
class DkvCache(Base):
    """The first two calls of a block, and every `refresh`-th from the first on, compute the whole canvas. The others
    compute masks, and tokens that were filled by the call before: keys and values of a token count once it was
    computed as a token, not as a mask.

    Where logits are of the slot after, a slot is read from the cache, with `shifted` = both, if it and the slot after
    it hold tokens that were in a call; with after, if the slot after it does.
    """

    refresh: int = option(8, least=1)
    shifted: str = option("both", one_of=("both", "after"))

    breaks = frozenset({Invariant.FED_BY_BLOCK})

    def feeds(self, sheet: Sheet) -> Mask:
        if sheet.step < 2 or sheet.step % self.refresh == 0:
            return sheet.every
        seen = sheet.age > 0
        if sheet.shift:
            after = np.append(seen[1:], seen[-1:])
            seen = after if self.shifted == "after" else seen & after
        fed: Mask = ~seen
        return fed
