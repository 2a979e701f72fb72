"""weights: how parameters are stored. A method is a pass over the parameters of the whole program."""

from __future__ import annotations

from abc import ABC
from dataclasses import dataclass

from accel.ir.invariants import Method
from accel.passes import Pass


@dataclass(frozen=True)
class Base(Pass, Method, ABC):
    """Rewrites how weights are stored; `error` bounds the relative change of the logits."""

    alone = True
