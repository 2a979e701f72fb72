"""Delayed caching of all slots (dKV-Cache-Greedy, arXiv:2505.15781): calls compute few masks and new tokens."""

from __future__ import annotations

from dataclasses import dataclass

from accel.ir.axis import option
from accel.ir.invariants import Invariant
from accel.runtime.canvas import Base, Mask, Sheet


@dataclass(frozen=True)
class DkvGreedy(Base):
    """A block's first call, and every `refresh`-th from it on, computes the whole canvas. The others compute the tokens
    that were filled by the call before, and the first `window` masks of the block, of which the loop chooses; other
    masks, too, are read from the cache.
    """

    refresh: int = option(2, least=1)
    window: int = option(4, least=1)

    breaks = frozenset({Invariant.FED_BY_BLOCK})
    lacks = "an order of slots drawn at random: masks are computed from left to right"

    def feeds(self, sheet: Sheet) -> Mask:
        if sheet.step % self.refresh == 0:
            return sheet.every
        masks = sheet.at[sheet.open & (sheet.at >= sheet.first) & (sheet.at < sheet.last)]
        near = masks[: self.window]
        fed: Mask = ~sheet.open & (sheet.age == 0)
        fed[near] = True
        return fed | sheet.asked(near)
