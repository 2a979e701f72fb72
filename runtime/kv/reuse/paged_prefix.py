"""Paged KV with shared prefixes (vLLM, RadixAttention): tokens that two rows begin with are computed and
stored once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from accel.ir.errors import RecipeError
from accel.runtime.kv.reuse import Base

_SCORES = "dropped tokens leave holes in blocks that other sessions go on from"
_APART = {
    "kv.score": _SCORES,
    "kv.budget": _SCORES,
    "kv.keep": _SCORES,
    "kv.when": _SCORES,
    "kv.select": "what is known of pages of a row's own slots says nothing of shared blocks",
    "prefill.sparse": "which keys a prompt's queries read depends on where the prompt begins",
    "numerics": "how attention's sums are cut depends on which tokens lie in blocks",
}


@dataclass(frozen=True)
class PagedPrefix(Base):
    """`block`: tokens of a block. `blocks`: of the pool that all sessions of a model share; memory is taken
    when they are first filled.
    """

    block: int = 16
    blocks: int = 2048

    pools = True
    grade = "distribution-exact"  # calls of other lengths differ by rounding
    small: ClassVar[Mapping[str, Any]] = {"block": 4}

    def __post_init__(self) -> None:
        for name in ("block", "blocks"):
            if getattr(self, name) < 1:
                raise RecipeError(f"{name} = {getattr(self, name)}; give 1 or more")

    def steps(self) -> list[Any]:
        from accel.passes.kv._shared.paged import Paged

        return [Paged(self.block)]

    def apart(self, axis: str, method: Any) -> str:
        if axis == "kv.codec" and method is not None and method.block:
            return "blocks of codes are of one row, and what sessions share has to be read by any"
        if axis == "depth" and method is not None and method.by_call:
            return "a layer that a call leaves out makes no keys, which blocks of other sessions would lack"
        found = (why for other, why in _APART.items() if f"{axis}.".startswith(f"{other}."))
        return next(found, "")
