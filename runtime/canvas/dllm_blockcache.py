"""Fast-dLLM's block caches (arXiv:2505.22618): calls within a block reuse the keys and values of other blocks."""

from __future__ import annotations

from dataclasses import dataclass

from accel.ir.axis import option
from accel.runtime.canvas import Base, Mask, Sheet


@dataclass(frozen=True)
class DllmBlockcache(Base):
    """Every block begins with a call of the whole canvas, which makes all keys and values anew. Later calls take, with
    `cache` = prefix, the block and the masks behind it; with dual, the block alone.

    Where logits are of the slot after, the slot before the block is in the calls too, so that no logits come from
    outside.
    """

    cache: str = option("dual", one_of=("prefix", "dual"))

    def feeds(self, sheet: Sheet) -> Mask:
        if not sheet.step:
            return sheet.every
        behind = (self.cache == "prefix") | (sheet.at < sheet.last)
        return (sheet.at >= sheet.first - sheet.shift) & behind
