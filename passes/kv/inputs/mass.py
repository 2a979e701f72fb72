"""`mass` [B,G,S]: the attention that each slot drew so far, as a method accumulates it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from accel.ir.invariants import Invariant
from accel.ir.program import Program
from accel.passes.kv.inputs import Input, Site, parameters
from accel.passes.kv.inputs._accumulated import accumulate


class Mass(Input):
    """State `mass.<layer>.kept [B,G,P]` and `mass.<layer>.recent [B,G,C]`, which each call updates by the
    `accumulate` of the first method that names `mass`.
    """

    names = ("mass",)
    relies = frozenset({Invariant.ALL_LAYERS_RUN, Invariant.FULL_ATTENTION})
    breaks = frozenset({Invariant.REWIND})  # what a draft drew of attention cannot be taken back

    def prepare(self, program: Program, sites: Sequence[Site], methods: Sequence[Any]) -> None:
        """See Input."""
        method = next(m for m in methods if callable(m) and "mass" in parameters(m))
        for site in sites:
            accumulate(program, site, "mass", method.accumulate, method)
