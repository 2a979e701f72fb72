"""Axis: which slots of a canvas a call of a masked-diffusion model computes; it reads the others as they are cached."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from accel.ir.invariants import Method
from accel.runtime.inputs.ints import Ints

__all__ = ["Base", "Part", "Sheet"]

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Sheet:
    """One row's canvas before a call.

    Attributes: `step`: calls of the block before; `first`, `last`: its slots, the last excluded; `open` [W]: which
    slots are masks to be filled; `age` [W]: calls of the row since a slot was filled or the row began, 0 of masks;
    `shift`: 1 where the logits of a slot are of the slot after it, else 0; `start`: slots of the prompt; `call`: calls
    of the row before; `new`: slots, the last ones, that the session does not hold.
    """

    step: int
    first: int
    last: int
    open: Mask
    age: Ints
    shift: int
    start: int = 0
    call: int = 0
    new: int = 0

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


@dataclass(frozen=True)
class Part:
    """Which of the slots that a call feeds its layers compute: those of `slots` [W], and `more` others, that each layer
    chooses.
    """

    slots: Mask
    more: int = 0


class Base(Method, ABC):
    """A frozen dataclass whose fields are its options. A method that computes a `part` of what it feeds has a pass
    (`steps`) that makes layers do so.
    """

    grade: ClassVar[str] = "approximate"
    masked_diffusion: ClassVar[bool] = True  # models that it is for
    reads: ClassVar[bool] = True  # whether calls read what earlier ones computed

    @abstractmethod
    def feeds(self, sheet: Sheet) -> Mask:
        """Which slots [W] the next call of a row computes. Those that the session does not hold yet are computed too.
        A call says something of the masks whose logits it has (`Sheet.asked`): of one or more of the block.
        """

    def part(self, sheet: Sheet) -> Part | None:
        """Which of them the layers compute; None: all. What the session does not hold yet is computed in any case."""
        return None

    def says(self, sheet: Sheet) -> Mask | None:
        """The masks [W] of which a call says something; None: all whose logits it has."""
        return None

    def steps(self) -> list[Any]:
        """The passes that it puts into a recipe. Only a build asks, which has torch."""
        return []
