"""What the request's own options leave: temperature, top-k, top-p, min-p and penalties."""

from __future__ import annotations

from dataclasses import dataclass

from accel.runtime.inputs.ints import Ints
from accel.runtime.sample import Base, Distribution


@dataclass(frozen=True)
class Standard(Base):
    """No more than each request says itself."""

    def reshape(self, law: Distribution, seen: Ints) -> Distribution:
        return law
