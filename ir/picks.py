"""Calls that compute some of their rows in each layer, and take the others as they were last computed."""

from __future__ import annotations

from dataclasses import dataclass

EVERY_ROW = "every_row"  # whether a call computes all of its rows, bool []
PICKS = "picks"  # else which: columns of the call [B,K], or the two below
CHOSEN, NONE = -1, -2  # a row that each layer chooses; no row


@dataclass(frozen=True)
class Picks:
    """first: the lowest layer that leaves rows out; those below it compute all rows of a call."""

    first: int = 0

    @property
    def inputs(self) -> dict[str, tuple[int | str, ...]]:
        """The inputs of the step that say it, with their sizes."""
        return {EVERY_ROW: (), PICKS: ("B", "K")}
