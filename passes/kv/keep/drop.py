"""Evict: tokens that are not kept are removed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from accel.passes.kv.keep import Base


@dataclass(frozen=True)
class Drop(Base):
    """The values are unchanged."""

    merges: ClassVar[bool] = False

    def __call__(self, values: Tensor, chosen: Tensor) -> Tensor:
        return values.gather(2, chosen[..., None].expand(-1, -1, -1, values.shape[3]))
