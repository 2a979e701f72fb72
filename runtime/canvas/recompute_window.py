"""The recomputed window of adaptive parallel decoding (arXiv:2506.00413): what lies far to the left is cached."""

from __future__ import annotations

from dataclasses import dataclass

from accel.ir.axis import option
from accel.ir.invariants import Invariant
from accel.runtime.canvas import Base, Mask, Sheet


@dataclass(frozen=True)
class RecomputeWindow(Base):
    """A call computes all slots from `window` - 1 before the leftmost one that is a mask or was filled by the call
    before. So a token is computed as a token at least once before its keys and values stay as they are. The first call
    of a row computes all.
    """

    window: int = option(16, least=1)

    breaks = frozenset({Invariant.FED_BY_BLOCK})

    def feeds(self, sheet: Sheet) -> Mask:
        new = sheet.open | (sheet.age == 0)
        fed: Mask = sheet.asked(sheet.open) | (sheet.at > int(new.argmax()) - self.window)
        return fed
