"""Paged KV cache with prefix sharing (vLLM's PagedAttention, arXiv:2309.06180; SGLang's RadixAttention,
arXiv:2312.07104): a common prefix is computed and stored once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from accel.ir.axis import count
from accel.ir.errors import RecipeError
from accel.ir.invariants import Invariant
from accel.runtime.kv.reuse import Base


@dataclass(frozen=True)
class PagedPrefix(Base):
    """`block`: tokens per block. `blocks`: size of the block pool that all sessions of a model share; memory
    is allocated on first use.
    """

    block: int = count(16, most=1024)
    blocks: int = count(2048, most=1 << 16)

    relies = Base.relies - {Invariant.HOST_MEMORY} | {
        Invariant.ALL_LAYERS_RUN,
        Invariant.CALL_INDEPENDENT,
        Invariant.TOKENS_CONTIGUOUS,
        Invariant.UNIFORM_SLOTS,
    }
    breaks = frozenset({Invariant.BATCH_INVARIANCE, Invariant.ROW_PRIVATE})
    grade = "distribution-exact"  # calls of other lengths differ by rounding
    small: ClassVar[Mapping[str, Any]] = {"block": 4}

    def __post_init__(self) -> None:
        for name in ("block", "blocks"):
            if getattr(self, name) < 1:
                raise RecipeError(f"{name} = {getattr(self, name)}; give 1 or more")

    def steps(self) -> list[Any]:
        from accel.passes.kv._shared.paged import Paged

        return [Paged(self.block)]
