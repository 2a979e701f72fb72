"""K-norm (arXiv:2406.11430): keep the tokens with the smallest key norms, which draw the most attention."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from accel.passes.kv.score import Base


@dataclass(frozen=True)
class KNorm(Base):
    """Reads neither queries nor values."""

    def __call__(self, keys: Tensor) -> Tensor:
        size: Tensor = torch.linalg.vector_norm(keys.float(), dim=-1)
        return -size
