"""batch: how rows of which calls have different numbers of tokens share a call."""

from __future__ import annotations

from abc import ABC
from dataclasses import dataclass

from accel.ir.invariants import Method
from accel.passes import Pass
from accel.passes.fuse.residual import Residual
from accel.passes.state.layers import Layers


@dataclass(frozen=True)
class Base(Pass, Method, ABC):
    """A layout of a call's tokens, as an entry beside the step. Sessions take it where the step, whose rows are padded
    to the longest, would compute much more (`runtime/session/flat.py`). The logits are those of the step, to rounding.
    """

    after = (Layers, Residual)
    stage = 9  # after all that changes the step
    must_change = True
