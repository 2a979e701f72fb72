"""Axis: what one session does with tokens that the model has seen before, in another one or elsewhere."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

__all__ = ["Base"]


class Base(ABC):
    """A method is a frozen dataclass. `steps` are its passes; a session does the rest."""

    grade: str
    pools: ClassVar[bool] = False  # whether sessions share blocks of tokens

    @abstractmethod
    def steps(self) -> list[Any]:
        """The passes that it puts into a recipe. Only a build asks, which has torch."""

    def apart(self, axis: str, method: Any) -> str:
        """Why it cannot go with another method of a recipe; empty where it can."""
        return ""
