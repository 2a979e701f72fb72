"""H2O (arXiv:2306.14048): keep the tokens with the most accumulated attention (heavy hitters) and the newest tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from accel.ir.axis import option
from accel.passes.kv.score import Base


@dataclass(frozen=True)
class H2O(Base):
    """`recent`: number of newest tokens to keep; heavy hitters fill the rest of the budget."""

    recent: int = option(128, least=0)
    when: ClassVar[str] = "generated"
    small: ClassVar[Mapping[str, Any]] = {"recent": 4}

    def __call__(self, mass: Tensor) -> Tensor:
        return mass
