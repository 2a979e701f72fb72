"""The parts of a program's text, as they are written: nothing is looked up yet."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from accel.ir.errors import TextError


@dataclass(frozen=True)
class Place:
    """Where something stands; both count from 1."""

    line: int
    column: int

    def error(self, text: str) -> TextError:
        return TextError(f"line {self.line}, column {self.column}: {text}")


@dataclass(frozen=True)
class Ref:
    """An input, a weight or a value (`%3`), read by its name."""

    name: str
    at: Place


@dataclass(frozen=True)
class Type:
    """A type as it is written, without spaces; of a tensor also its dtype and sizes."""

    text: str
    at: Place
    dtype: str = ""
    sizes: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Input:
    name: str
    type: Type
    at: Place
    default: Any = None  # numbers in lists


@dataclass(frozen=True)
class Weight:
    """A weight that the graph reads; `bound`: the value or name by which lines below it do."""

    name: str
    type: Type
    at: Place
    bound: str


@dataclass(frozen=True)
class Call:
    value: str
    type: Type | None
    operator: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    at: Place  # of the operator


@dataclass(frozen=True)
class Result:
    output: str  # "" in a region
    value: Ref


@dataclass
class Body:
    inputs: list[Input]
    lines: list[Weight | Call] = field(default_factory=list)
    results: list[Result] | None = None


@dataclass
class Section:
    """An entry, or a region that the entry above it calls."""

    name: str
    at: Place
    bodies: list[Body]  # two of a region that may be left out

    @property
    def is_entry(self) -> bool:
        """Outputs of entries have names."""
        return any(r.output for r in self.bodies[0].results or [])


@dataclass(frozen=True)
class StateLine:
    name: str
    type: Type
    fields: dict[str, Any]
    at: Place


@dataclass
class Tree:
    """A text, read."""

    state: list[StateLine] = field(default_factory=list)
    entries: dict[str, tuple[Section, dict[str, Section]]] = field(default_factory=dict)
