"""Axis: how many tokens are drafted in a round."""

from __future__ import annotations

from abc import ABC, abstractmethod

__all__ = ["Base", "Pace"]


class Pace(ABC):
    """Says it for one row, from its prompt to its end."""

    @abstractmethod
    def limit(self) -> int:
        """Most tokens of the next draft, 0 or more."""

    def observe(self, drafted: int, accepted: int) -> None:  # noqa: B027
        """What became of a draft: how many tokens it had, how many of them stand."""


class Base(ABC):
    """A method: a frozen dataclass whose fields are its options, shared by all rows."""

    @abstractmethod
    def begin(self) -> Pace:
        """For a new row; a method that remembers nothing is its own."""
