"""NAME (paper, arXiv): what it does, in a sentence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from accel.runtime.kv.file import Arrays, Base, Numbers, Place


@dataclass(frozen=True)
class Template(Base):
    """How a file holds keys and values: here, in half precision."""

    grade = "approximate"

    def encode(self, place: Place, x: Numbers) -> Arrays:
        most = np.abs(x).max()
        return {"x": (x / (most or 1)).astype(np.float16), "most": np.array(most or 1)}

    def decode(
        self, place: Place, parts: Mapping[str, npt.NDArray[Any]], shape: tuple[int, ...]
    ) -> Numbers:
        found: Numbers = parts["x"].reshape(shape).astype(np.float32) * parts["most"]
        return found

    def bound(self, place: Place, x: Numbers) -> Numbers:
        """Half a unit in the last of the 11 bits that the largest number has."""
        return np.full_like(x, np.abs(x).max() * 2.45e-4)
