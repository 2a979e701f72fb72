"""KeyDiff (arXiv:2504.15364): keep the tokens whose keys are least similar to the mean key."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from accel.passes.kv.score import Base


@dataclass(frozen=True)
class KeyDiff(Base):
    """Reads neither queries nor values."""

    def __call__(self, keys: Tensor, positions: Tensor) -> Tensor:
        unit = torch.nn.functional.normalize(keys.float(), dim=-1)
        there = (positions >= 0)[..., None]
        total = (unit.nan_to_num() * there).sum(2, keepdim=True)  # a broken key harms itself only
        anchor = torch.nn.functional.normalize(total, dim=-1)
        return -(unit * anchor).sum(-1)
