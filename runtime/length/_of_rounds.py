"""Lengths whose head reads a draft level by level, and learns from rounds what became of drafts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from accel.ir.trained import Tensors
from accel.runtime.call import Logits
from accel.runtime.length import Pace
from accel.runtime.length._head import Array, Head, chance
from accel.runtime.speculation.round_cost import RoundCost
from accel.runtime.tree import Level


class Reader(ABC):
    """What a head reads of one draft."""

    @abstractmethod
    def read(self, level: Level, logits: Sequence[Logits]) -> Array:
        """[F], of a level as `Pace.more` is told it; levels come in turn."""


class OfRounds(Head):
    """Its head foretells after each level whether to go on. `threshold` and `most`, fields: the draft ends where that
    is less likely, and at so many tokens.
    """

    threshold: float
    most: int
    drafts: ClassVar[Mapping[str, Any]]  # a recipe's tables, whose rounds it learns from

    @abstractmethod
    def reader(self) -> Reader:
        """For a new draft."""

    @classmethod
    @abstractmethod
    def label(cls, level: int, accepted: int) -> bool:
        """Whether it was right to go on after level 1, 2, … of a draft of which `accepted` levels stand."""

    @classmethod
    def sizes(cls, inner: int) -> dict[str, tuple[int, ...]]:
        """See Head: one hidden layer."""
        found = {"first": (cls.width(), inner), "last": (inner, 1)}
        return {**found, **{f"{name}.bias": size[1:] for name, size in found.items()}}

    @classmethod
    @abstractmethod
    def width(cls) -> int:
        """F of what it reads."""

    @classmethod
    def odds(cls, head: Mapping[str, Any], x: Any) -> Any:
        """See Head: that going on is right."""
        x = x @ head["first"] + head["first.bias"]
        x = x * (x > 0)
        return (x @ head["last"] + head["last.bias"])[:, 0]

    def begin(self, cost: RoundCost) -> Pace:
        return _Pace(self, self.part)


class _Pace(Pace):
    def __init__(self, of: OfRounds, head: Tensors):
        self._of, self._head = of, head
        self._reader = of.reader()

    def limit(self) -> int:
        return self._of.most

    def more(self, level: Level, logits: Sequence[Logits]) -> bool:
        x = self._reader.read(level, logits)
        return float(chance(self._of.odds(self._head, x[None]))[0]) >= self._of.threshold

    def observe(self, drafted: int, accepted: int) -> None:
        self._reader = self._of.reader()


def likely(logits: Sequence[Logits], level: Level) -> Array:
    """The logarithms [n] of the chances of a level's tokens, each among those of its own logits."""
    lines = np.stack(logits).astype(np.float32)
    lines = lines - lines.max(-1, keepdims=True)
    own = np.take_along_axis(lines, level.tokens[:, None], -1)[:, 0]
    found: Array = own - np.log(np.exp(lines).sum(-1))
    return found
