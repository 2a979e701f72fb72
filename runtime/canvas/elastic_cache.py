"""Elastic-Cache (arXiv:2510.14973): the cache is refreshed when attention drifts, from the layer where it does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from accel.ir.axis import option
from accel.ir.invariants import Invariant
from accel.runtime.canvas import Base, Mask, Part, Sheet


@dataclass(frozen=True)
class ElasticCache(Base):
    """A call computes the first `window` masks of the canvas, of which the loop chooses, and what the call before
    filled; other slots are read from the cache. Each layer tracks the token to which those masks attend most. It is
    computed too, and where its attention is no longer like that of the call before (cosine below `threshold`; higher:
    more often), the layers above compute the whole canvas. A call of slots that are new computes all: the first of a
    row. So does every `refresh`-th (0: no other).

    Where logits are of the slot after, the slot before a mask of the window is computed with it.
    """

    window: int = option(16, least=1)
    threshold: float = option(0.9, least=-1)
    refresh: int = option(0, least=0)

    relies = frozenset({Invariant.PLAIN_KEYS, Invariant.ALL_LAYERS_RUN, Invariant.FIXED_LAYERS})
    breaks = frozenset({Invariant.FED_BY_BLOCK})

    def feeds(self, sheet: Sheet) -> Mask:
        return sheet.every

    def part(self, sheet: Sheet) -> Part | None:
        if sheet.new or (self.refresh and sheet.call % self.refresh == 0):
            return None
        masks = self.says(sheet)
        return Part(masks | sheet.asked(masks) | (~sheet.open & (sheet.age == 0)))

    def says(self, sheet: Sheet) -> Mask:
        masks: Mask = sheet.open & (sheet.open.cumsum() <= self.window)
        return masks

    def steps(self) -> list[Any]:
        """See Base."""
        from accel.passes.rows.elastic import Elastic

        return [Elastic(self, self.window, self.threshold)]
