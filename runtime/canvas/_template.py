"""NAME (paper, arXiv): what it does, in a sentence."""

from __future__ import annotations

from dataclasses import dataclass

from accel.runtime.canvas import Base, Mask, Sheet


@dataclass(frozen=True)
class Template(Base):
    """Which slots a call computes: here, from the second call of a block on, those from the block on."""

    def feeds(self, sheet: Sheet) -> Mask:
        return sheet.every if not sheet.step else sheet.at >= sheet.first - sheet.shift
