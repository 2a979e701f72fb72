"""Sinks and newest blocks: the mask of StreamingLLM (arXiv:2309.17453) on a prompt, its end dense."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from accel.ir.axis import option
from accel.ir.errors import RecipeError
from accel.passes.prefill.sparse import Base


@dataclass(frozen=True)
class TriShape(Base):
    """A segment attends to the blocks of the first `sinks` tokens and to the newest blocks. Its last segment
    attends to all keys, which makes the A of MInference (arXiv:2407.02490) its tri-shape.

    The window goes back from the segment's first token, so that its later queries read up to a segment more than a
    window of tokens. It goes by position alone: the control of methods that look at keys.
    """

    sinks: int = option(128, least=0)
    by_position: ClassVar[bool] = True
    small: ClassVar[Mapping[str, Any]] = {
        "segment": 8, "block": 4, "budget": 8, "threshold": 8, "sinks": 4
    }  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sinks > self.budget:
            raise RecipeError(
                f"{self.full_name}: sinks is {self.sinks}; give at most budget = {self.budget}"
            )

    def score(self, past: Tensor, high: Tensor) -> Tensor:
        age = past.long().cumsum(-1)  # [B,NB], the newest of the past is largest
        blocks = -(-self.sinks // self.block)
        forced = (age <= blocks) * (age.amax(-1, keepdim=True) + 1)
        return (age + forced)[:, None].expand(-1, high.shape[1], -1).float()
