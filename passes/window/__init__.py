"""Axis: which tokens layers keep that see a window of them only."""

from __future__ import annotations

from abc import ABC
from dataclasses import dataclass

from accel.ir.invariants import Method
from accel.passes import Pass
from accel.passes.state.cache import Cache
from accel.passes.state.head import Head

__all__ = ["Base"]


@dataclass(frozen=True)
class Base(Pass, Method, ABC):
    """A pass over the state, before keys and values are stored otherwise. The logits stay those of the model. A recipe
    without the axis has `newest`, unless one of its methods conflicts with it.
    """

    after = (Cache, Head)
    flat = True
    stage = -1
