"""What a session has to know of a recipe whose attention selects what it reads, as a manifest keeps it."""

from __future__ import annotations

from dataclasses import dataclass

from accel.ir.fields import Positive


@dataclass(frozen=True)
class Selection:
    """width: most tokens of a call that read what they would read in calls of one. history: a token chooses by what
    more tokens than the one before it left, in calls of whatever width.
    """

    width: Positive
    history: bool = False
