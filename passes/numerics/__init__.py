"""numerics: numeric guarantees beyond the error bound."""

from __future__ import annotations

from abc import ABC
from dataclasses import dataclass

from accel.ir.invariants import Method
from accel.passes import Pass


@dataclass(frozen=True)
class Base(Pass, Method, ABC):
    """A numeric guarantee. The pass refuses models that cannot have it; lowering and runtime implement it."""
