"""H2O (arXiv:2306.14048): tokens that drew most attention so far stay, and the newest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from accel.passes.kv.score import Base


@dataclass(frozen=True)
class H2O(Base):
    """`recent`: newest tokens that stay; heavy hitters fill the rest of the budget."""

    recent: int = 128
    when: ClassVar[str] = "every"

    def __call__(self, mass: Tensor) -> Tensor:
        return mass
