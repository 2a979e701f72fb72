"""How tokens of the cache are grouped into units: when, and how many a unit has, as a manifest keeps it."""

from __future__ import annotations

from dataclasses import dataclass

from accel.ir.fields import Positive
from accel.ir.sizes import FEW


@dataclass(frozen=True)
class Units:
    """Of a row, the first `sinks` tokens are in no unit. The others of a prompt are grouped when it is whole, and
    generated ones `every` tokens at a time, a multiple of `size`: so many tokens make a unit, on average.

    marks: whether units go by what a session knows of tokens. It says which lie together: as `Session.mark` says, or up
    to a token of the ids `ends`, or, where there are none, `size` neighbours.
    """

    size: Positive
    every: Positive
    sinks: int
    marks: bool = False
    ends: tuple[int, ...] = ()

    @property
    def tail(self) -> int:
        """Most tokens, the newest, that a token reads beside units: a call of FEW tokens groups nothing, and gives
        what single tokens do.
        """
        return self.every + FEW - 1
