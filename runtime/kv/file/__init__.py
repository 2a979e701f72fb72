"""Axis: how a saved session stores keys and values. Without a method they are stored as they are."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from accel.ir.invariants import Method

__all__ = ["Arrays", "Base", "Numbers", "Place"]

Arrays = dict[str, npt.NDArray[Any]]
Numbers = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Place:
    """Which keys or values: of layer `layer` of `layers`."""

    layer: int
    layers: int
    keys: bool


class Base(Method, ABC):
    """A frozen dataclass. `session.save` encodes, and `model.open_session` decodes; a session that runs holds plain
    numbers.
    """

    grade: str

    @property
    def levels(self) -> Sequence[Base]:
        """Ways to send keys and values, the nearest and largest first (`session.export_chunks`)."""
        return (self,)

    @abstractmethod
    def encode(self, place: Place, x: Numbers) -> Arrays:
        """What a file holds of x [B,G,S,D], none of whose sizes is 0, and whose numbers are finite: arrays by name."""

    @abstractmethod
    def decode(
        self, place: Place, parts: Mapping[str, npt.NDArray[Any]], shape: tuple[int, ...]
    ) -> Numbers:
        """x [B,G,S,D] of this shape, out of what `encode` gave. Raises ValueError where that is damaged."""

    @abstractmethod
    def bound(self, place: Place, x: Numbers) -> Numbers:
        """How far each number of x [B,G,S,D] may be from what is read back, in the same shape."""
