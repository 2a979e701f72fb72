"""Axis: how the next token is picked from its logits."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import numpy.typing as npt

__all__ = ["Base"]


class Base(ABC):
    """A method is a frozen dataclass whose fields are its options; wrong values are InputErrors
    when it is made.
    """

    @abstractmethod
    def __call__(
        self, logits: npt.NDArray[np.float32], seen: npt.NDArray[np.int64], rng: np.random.Generator
    ) -> int:
        """The next token. logits [V], not to be changed; seen [n]: prompt and new tokens so far."""
