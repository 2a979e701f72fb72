"""numerics: what is promised of the numbers beside being near the model's own."""

from __future__ import annotations

from abc import ABC
from dataclasses import dataclass

from accel.ir.invariants import Method
from accel.passes import Pass


@dataclass(frozen=True)
class Base(Pass, Method, ABC):
    """Refuses models for which it cannot hold its promise; lowering and runtime keep it."""
