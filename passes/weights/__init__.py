"""weights: how parameters are stored. A method is a pass over the parameters of the whole program."""

from __future__ import annotations

from abc import ABC
from dataclasses import dataclass

from accel.ir.invariants import Method
from accel.passes import Pass


@dataclass(frozen=True)
class Base(Pass, Method, ABC):
    """Rewrites how weights are stored, and notes in `Weights.origins` what it rounds, which the numeric check restores;
    `error`: how far it may move the logits of random weights, relative to the largest, for `accel-compile smoke`.
    """

    alone = True

    @property
    def recodes(self) -> bool:
        """Whether it rounds anew what a checkpoint holds in codes; else those stay."""
        return False
