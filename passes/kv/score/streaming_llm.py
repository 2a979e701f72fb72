"""StreamingLLM (arXiv:2309.17453): the first few tokens draw attention whatever they say; then the newest count.

Positions stay those of the text, so this is the paper's set of tokens without its re-numbering.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from accel.ir.errors import RecipeError
from accel.passes.kv.score import Base


@dataclass(frozen=True)
class StreamingLlm(Base):
    """`sinks`: first tokens that stay; the window is what the budget leaves beside them."""

    sinks: int = 4
    when: ClassVar[str] = "every"
    small: ClassVar[Mapping[str, Any]] = {"sinks": 2}

    def __post_init__(self) -> None:
        if self.sinks < 0:
            raise RecipeError(f"kv.score.streaming-llm: sinks is {self.sinks}; give at least 0")

    def __call__(self, positions: Tensor) -> Tensor:
        return positions.float()
