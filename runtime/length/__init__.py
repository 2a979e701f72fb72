"""Axis: how many tokens are drafted in a round."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import numpy.typing as npt

from accel.ir.invariants import Method
from accel.runtime.speculation.round_cost import RoundCost

__all__ = ["Base", "Pace"]


class Pace(ABC):
    """Says it for one row, from its prompt to its end."""

    @abstractmethod
    def limit(self) -> int:
        """Most tokens of the next draft, 0 or more."""

    def more(self, logits: npt.NDArray[np.float32], token: int) -> bool:
        """Whether to draft another token after one that the drafter chose by its logits [V] (not to be kept). Drafters
        that work token by token ask after each one, in turn; the last that the limit allows is told too. The token
        stays in the draft whatever the answer, or samples would lean towards what drafters are sure of.
        """
        return True

    def observe(self, drafted: int, accepted: int) -> None:  # noqa: B027
        """What became of a draft: how many tokens it had, how many of them stand."""


class Base(Method, ABC):
    """A method: a frozen dataclass whose fields are its options, shared by all rows."""

    def fit(self, model: Any) -> None:
        """Raises InputError where what it goes by was made for another model than sessions are of (`loop.Model`)."""

    @abstractmethod
    def begin(self, cost: RoundCost) -> Pace:
        """For a new row; a method that remembers nothing is its own."""
