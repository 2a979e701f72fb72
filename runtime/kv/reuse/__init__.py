"""Axis: how a session reuses keys and values that another session, or an earlier text, computed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from accel.ir.invariants import Invariant, Method

__all__ = ["Base"]


class Base(Method, ABC):
    """A frozen dataclass. `steps` are its passes; a session does the rest."""

    grade: str
    relies = frozenset({Invariant.APPEND_ONLY, Invariant.CHAINS, Invariant.HOST_MEMORY})

    @abstractmethod
    def steps(self) -> list[Any]:
        """The passes that it puts into a recipe. Only a build asks, which has torch."""
