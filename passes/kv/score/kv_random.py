"""Random scores: the control that every other score is compared with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from accel.ir.axis import option
from accel.ir.ops.noise import uniform
from accel.passes.kv.score import Base


@dataclass(frozen=True)
class KVRandom(Base):
    """A hash of `seed`, layer, head and position, so a token has the same score whenever and wherever it is asked for.
    `sinks`, `recent`: number of first and newest tokens to keep.
    """

    sinks: int = option(4, least=0)
    recent: int = option(32, least=0)
    seed: int = option(0, least=0)
    small: ClassVar[Mapping[str, Any]] = {"sinks": 1, "recent": 2}
    by_position: ClassVar[bool] = True

    def __call__(self, positions: Tensor, layer: Tensor) -> Tensor:
        head = positions.new_ones(positions.shape[:2]).cumsum(1)[..., None]
        return uniform(self.seed, layer, head, positions)
