"""kv.codec: how keys and values are stored. A method is a few pure functions of tensors (`Codec`); one pass, `Encode`,
inserts them between attention and the cache.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from accel.ir.invariants import Invariant, Method
from accel.ir.tables import Tables
from accel.passes import Pass
from accel.passes.kv.codec._encode import Encode
from accel.passes.kv.codec._method import AcrossLayers, At, Codec, Layout, Storage
from accel.passes.trained import Trained

__all__ = ["AcrossLayers", "At", "Base", "Layout", "Storage"]

BLOCKS_RELY = frozenset(
    {
        Invariant.APPEND_ONLY,
        Invariant.HEADS_LEVEL,
        Invariant.ROW_PRIVATE,
        Invariant.UNIFORM_SLOTS,
    }
)
QUERIES_RELY = frozenset({Invariant.ALL_LAYERS_RUN, Invariant.ALL_TOKENS_HELD})
BLOCKS_BREAK = frozenset({Invariant.CALL_INDEPENDENT, Invariant.BATCH_INVARIANCE})


@dataclass(frozen=True)
class Base(Codec, Method):
    """A codec as recipes name it."""

    grade = "approximate"

    others: ClassVar[tuple[Mapping[str, Any], ...]] = ()
    """Options that the laws try beside the defaults."""

    @property
    def relies(self) -> frozenset[Invariant]:
        asks, across = self.storage, isinstance(self, AcrossLayers)
        heads = frozenset({Invariant.HEADS_ALIKE} if asks.together else ())
        if isinstance(self, Tables):  # constants of a head say nothing of one list of all
            heads |= {Invariant.HEADS_LEVEL}
        if asks.coarse or across:  # what eviction keeps is read in one way, and by layer
            heads |= {Invariant.ALL_TOKENS_HELD}
        if across:
            heads |= {Invariant.ALL_LAYERS_RUN}
        queries = QUERIES_RELY if asks.queries else frozenset()
        if asks.block and (across or asks.queries or isinstance(self, Tables | Trained)):
            heads |= {Invariant.FIXED_LAYERS}  # layers go by each other, or are known by number
        return heads | queries | (BLOCKS_RELY if asks.block else frozenset())

    @property
    def breaks(self) -> frozenset[Invariant]:
        plain = frozenset({Invariant.PLAIN_KEYS})
        if self.storage.queries:  # a draft's stay in the sum
            plain |= {Invariant.REWIND}
        return plain | (BLOCKS_BREAK if self.storage.block else frozenset())

    @property
    def provides(self) -> frozenset[Invariant]:
        return frozenset({Invariant.COARSE_READS} if self.storage.coarse else ())

    def steps(self) -> Sequence[Pass]:
        return [Encode(self)]
