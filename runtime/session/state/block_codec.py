"""What a session does about a codec that encodes tokens in blocks: which go from the recent slots to what is stored."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from accel.runtime.call import Arrays
from accel.runtime.inputs.ints import Ints
from accel.runtime.session.observers.observer import Capabilities, ModelParts, ObserverFactory
from accel.runtime.session.state._kv_plan import kv_plan
from accel.runtime.session.state.eviction import EvictionState


class BlockCodecState(EvictionState):
    """Every token is kept. The first `sinks` of a row stay in its first slots; the next `base` [B] lie in blocks
    of R = `flush` tokens (`KvFacts`).

    A row that has 2 R recent tokens or more beside these gives up whole blocks of its oldest until fewer are left: so
    what is stored goes by the number of its tokens alone, and the newest R can always be rewound.
    """

    @classmethod
    def for_model(cls, model: ModelParts) -> ObserverFactory | None:
        """Where the recipe encodes whole blocks, and drops nothing."""
        plan = kv_plan(model.tables, model.facts.kv, model.state)
        return (
            ObserverFactory(lambda n: cls(plan, n))
            if plan is not None and plan.facts.flush
            else None
        )

    @property
    def capabilities(self) -> Capabilities:
        """The newest block stays as it is."""
        return Capabilities(back=self.plan.facts.flush, chunks=False)

    def call_room(self, lengths: Ints) -> Ints:
        """A call that fills the second block is one of a single token: the first then goes into codes for good."""
        free = 2 * self.plan.facts.flush - (lengths - self.base - self.plan.facts.sinks)
        found: Ints = np.maximum(free - 1, 1)
        return found

    @property
    def held_from(self) -> Ints:
        """See SessionObserver."""
        found: Ints = np.where(self.base > 0, self.base + self.plan.facts.sinks, 0)
        return found

    def due(self, moment: str, lengths: Ints) -> bool:
        """Whether any row has a block to give; `moment` does not matter."""
        return bool((self._given_up(lengths) > 0).any())

    def compress_inputs(
        self, lengths: Ints, recent: Mapping[int, int], kept_slots: Mapping[int, int]
    ) -> Arrays:
        """Inputs of the entry, beside the state (passes/kv/codec/_blocks.py); `kept_slots`: blocks that there is
        room for.
        """
        size, new = self.plan.facts.flush, self._given_up(lengths)
        old, count = self.base // size, int(new.max())
        place = np.arange(int((old + new).max()))
        (room,) = kept_slots.values()
        places = np.where(place < old[:, None], place, room + place - old[:, None])
        left, sinks = lengths - self.base - new * size, self.plan.facts.sinks
        slot = np.arange(int(left.max()))
        behind = np.where(slot < sinks, slot, slot + new[:, None] * size)
        return {
            "fresh": sinks + np.arange(count * size).reshape(count, size),
            "places": np.where(place < (old + new)[:, None], places, -1),
            "tail": np.where(slot < left[:, None], behind, -1),
        }

    def compressed(self, lengths: Ints) -> None:
        """The blocks were moved."""
        self.base = self.base + self._given_up(lengths) * self.plan.facts.flush

    def _given_up(self, lengths: Ints) -> Ints:
        """How many blocks each row gives up [B]."""
        free = lengths - self.base - self.plan.facts.sinks
        found: Ints = np.maximum(free // self.plan.facts.flush - 1, 0)
        return found
