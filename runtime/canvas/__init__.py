"""Axis: which slots of a canvas a call of a masked-diffusion model computes; it reads the others as they are cached."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from accel.ir.invariants import Method
from accel.runtime.inputs.ints import Ints

__all__ = ["Base", "Sheet"]

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Sheet:
    """One row's canvas before a call.

    Attributes: `step`: calls of the block before; `first`, `last`: its slots, the last excluded; `open` [W]: which
    slots are masks to be filled; `age` [W]: calls of the row since a slot was filled or the row began, 0 of masks;
    `shift`: 1 where the logits of a slot are of the slot after it, else 0.
    """

    step: int
    first: int
    last: int
    open: Mask
    age: Ints
    shift: int

    @property
    def every(self) -> Mask:
        """All slots."""
        return np.ones(self.open.size, np.bool_)

    @property
    def at(self) -> Ints:
        """The numbers of the slots, [W]."""
        return np.arange(self.open.size)

    def asked(self, slots: Any) -> Mask:
        """The slots [W] whose logits are those of `slots`, numbers or bools [W]."""
        found = np.zeros(self.open.size, np.bool_)
        found[np.maximum(self.at[slots] - self.shift, 0)] = True
        return found


class Base(Method, ABC):
    """A frozen dataclass whose fields are its options."""

    grade: ClassVar[str] = "approximate"
    masked_diffusion: ClassVar[bool] = True  # models that it is for
    reads: ClassVar[bool] = True  # whether calls read what earlier ones computed

    @abstractmethod
    def feeds(self, sheet: Sheet) -> Mask:
        """Which slots [W] the next call of a row computes. Those that the session does not hold yet are computed too.
        A call says something of the masks whose logits it has (`Sheet.asked`): of one or more of the block.
        """
