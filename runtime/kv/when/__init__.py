"""Axis: when a session evicts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from accel.ir.invariants import Invariant, Method

__all__ = ["MOMENTS", "Base"]

MOMENTS = (
    "part",
    "call",
    "token",
    "prompt",
)  # between the parts of a long call; after a call of a prompt, and of generated tokens; a prompt is whole


class Base(Method, ABC):
    """When to evict. A session asks at each point; with a budget that keeps all tokens nothing happens."""

    whole: ClassVar[bool] = False  # whether it goes by all tokens that are held

    @abstractmethod
    def due(self, moment: str, recent: int) -> bool:
        """Whether to compress now: `recent` tokens (of the longest row) came since the last time; where it goes by the
        `whole`, so many are held.
        """

    @property
    def single(self) -> bool:
        """Whether it may be due after a call of one token."""
        return self.due("call", 1 << 40) or self.due("token", 1 << 40)

    @property
    def breaks(self) -> frozenset[Invariant]:
        """What a token made a session drop, while others come, cannot be had back."""
        found = frozenset({Invariant.TOKENS_CONTIGUOUS})
        return found | {Invariant.DECODE_WIDTH, Invariant.REWIND} if self.single else found
