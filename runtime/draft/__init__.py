"""Axis: where drafted tokens come from. What a drafter proposes changes the speed and never the tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import numpy.typing as npt

from accel.runtime.ints import Ints
from accel.runtime.tree import Tree
from accel.runtime.verify import Verdict

__all__ = ["Base", "Drafter"]


class Drafter(ABC):
    """What drafts for one row, from its prompt to its end; it may remember what it saw."""

    @abstractmethod
    def draft(self, seen: Ints, limit: int) -> Tree:
        """What may follow the committed tokens `seen` [n], a view, not to be kept: at most `limit` (1 or more)
        tokens; none where it has no idea.
        """

    def observe(self, verdict: Verdict, logits: npt.NDArray[np.float32]) -> None:  # noqa: B027
        """What became of the last draft: the target's logits [N+1,V] after the last committed token and after
        each drafted one, and what stands. A step without a draft is told too, N = 0. Not to be kept.
        """


class Base(ABC):
    """A method: a frozen dataclass whose fields are its options, shared by all rows."""

    @abstractmethod
    def begin(self, prompt: Ints) -> Drafter:
        """A drafter for a row with this prompt [n]; a method that remembers nothing is its own."""
