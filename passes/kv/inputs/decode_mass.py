"""`decode_mass` [B,G,S]: the attention that each slot drew from generated tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from accel.ir.invariants import Invariant
from accel.ir.program import Program
from accel.passes.kv.inputs import Input, Site
from accel.passes.kv.inputs._accumulated import Draw, accumulate


class DecodeMass(Input):
    """State `mass.<layer>.decode.…`. A call of one token is a generated token's."""

    names = ("decode_mass",)
    relies = frozenset({Invariant.ALL_LAYERS_RUN, Invariant.FULL_ATTENTION})
    breaks = frozenset({Invariant.REWIND})  # what a draft drew of attention cannot be taken back

    def prepare(self, program: Program, sites: Sequence[Site], methods: Sequence[Any]) -> None:
        """See Input."""
        for site in sites:
            accumulate(program, site, "decode_mass", generated, "decode_mass", "decode")


def generated(decode_mass: Tensor, drawn: Draw, steps: Tensor) -> Tensor:
    """Operands as `accumulate` gives them: `decode_mass` [B,G,S] after a call."""
    return decode_mass + drawn() * (steps > 0)[:, None, None]
