"""SCOPE (arXiv:2412.13649): what was kept of a prompt stays, and generated tokens compete among themselves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from accel.ir.axis import option
from accel.passes.kv.refine import Base
from accel.passes.kv.refine._phases import frozen


@dataclass(frozen=True)
class Scope(Base):
    """`recent`: the newest generated tokens, which stay, too; the others by the score, which in the paper is the
    attention of the newest query (`tova`). `kv.budget.phases` gives both parts their budgets.
    """

    recent: int = option(256, least=0, most=1 << 20)
    small: ClassVar[Mapping[str, Any]] = {"recent": 3}

    def __call__(self, scores: Tensor) -> Tensor:
        return scores

    def first(self, positions: Tensor, prompt: Tensor, seen: Tensor) -> Tensor:
        """See Base."""
        age = seen[:, None, None] - 1 - positions
        new = (positions >= prompt[:, None, None]) & (age < self.recent)
        late = 0.5 * (1 - age / (self.recent + 1))
        none = torch.zeros_like(late)
        return torch.where(
            frozen(positions, prompt, seen), 1.0, torch.where(new & (positions >= 0), late, none)
        )
