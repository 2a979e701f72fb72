"""dLLM-Cache (arXiv:2506.06295): prompt and answer are refreshed at different intervals, and between two refreshes of
the answer each layer computes the slots whose values changed most.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from accel.ir.axis import option
from accel.ir.invariants import Invariant
from accel.runtime.canvas import Base, Mask, Part, Sheet


@dataclass(frozen=True)
class DllmFeatcache(Base):
    """Every `prompt`-th call of a row computes its prompt, every `answer`-th its answer. Another call makes the values
    of all slots of the answer anew in each layer, and computes the rest of the layer of a `share` of them: those whose
    values are least like the ones in the cache. Of other slots it takes the keys, and what attention and the MLP gave,
    as they were last computed. The first layer computes all slots that a call is given.

    Where logits are of the slot after, the last slot of the prompt is of the answer.
    """

    prompt: int = option(50, least=1)
    answer: int = option(7, least=1)
    share: float = option(0.25, least=0, most=1)

    relies = frozenset({Invariant.PLAIN_KEYS, Invariant.ALL_LAYERS_RUN, Invariant.FIXED_LAYERS})
    breaks = frozenset({Invariant.FED_BY_BLOCK})

    def feeds(self, sheet: Sheet) -> Mask:
        return sheet.every if sheet.call % self.prompt == 0 else self._answer(sheet)

    def part(self, sheet: Sheet) -> Part | None:
        if sheet.call % self.answer == 0:
            return None
        answer = self._answer(sheet)
        return Part(self.feeds(sheet) & ~answer, int(self.share * answer.sum()))

    def _answer(self, sheet: Sheet) -> Mask:
        """Its slots [W]."""
        found: Mask = sheet.at >= sheet.start - sheet.shift
        return found

    def steps(self) -> list[Any]:
        """See Base."""
        from accel.passes.rows.stored import Stored

        return [Stored(self)]
