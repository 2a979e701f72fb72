"""Axis: what a loop is given of a request's prompt."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

from accel.ir.invariants import Method
from accel.runtime.inputs.ints import Ints

__all__ = ["Base"]


class Base(Method, ABC):
    """A frozen dataclass whose fields are its options.

    Ids that a method adds may lie behind the vocabulary (`Facts.extra_ids`): the model reads them and never says them.
    Samplers see them in the prompt. Drafters, texts, grammars and a request's own functions do not (`Row.text`).
    """

    grade: ClassVar[str] = "approximate"

    @abstractmethod
    def read(self, prompt: Ints, vocab_size: int) -> Ints:
        """What the model reads of a prompt [n]: ids [m], the prompt's own in their order."""

    def steps(self) -> list[Any]:
        """The passes that it puts into a recipe. Only a build asks, which has torch."""
        return []
