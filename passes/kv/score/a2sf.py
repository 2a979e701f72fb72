"""A2SF (arXiv:2407.20485): H2O with forgetting. Accumulated attention loses a share with every further token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from accel.ir.axis import option
from accel.passes.kv.inputs._accumulated import Draw
from accel.passes.kv.score import Base


@dataclass(frozen=True)
class A2SF(Base):
    """`decay`: the weight of a query's attention falls by this factor with each later token; 1 is H2O. `recent`:
    number of newest tokens to keep.

    The paper's current code scores the prompt alone; here generated tokens count, too, as in its first version.
    """

    decay: float = option(0.95, least=0, most=1)
    recent: int = option(128, least=0)
    when: ClassVar[str] = "generated"
    small: ClassVar[Mapping[str, Any]] = {"recent": 4}

    def accumulate(self, mass: Tensor, drawn: Draw, query_positions: Tensor) -> Tensor:  # type: ignore[override]
        """See Base."""
        real = query_positions >= 0
        after = (real.sum(1, keepdim=True) - real.cumsum(1)).float()  # real queries behind each
        before: Tensor = self.decay ** real.sum(1).float()
        return mass * before[:, None, None] + drawn(self.decay**after)

    def __call__(self, mass: Tensor) -> Tensor:
        return mass
