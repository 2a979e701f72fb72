"""Forms that calls are written in: each reads them as they come, and gives the grammar that lets nothing else come."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from accel.runtime.decode.schema_limits import OPTIONS


@dataclass(frozen=True)
class Tool:
    """A function that the model may call. `schema`: of its arguments, a JSON object; `strict`: they follow it."""

    name: str
    schema: Mapping[str, Any]
    strict: bool = False


@dataclass(frozen=True)
class Begin:
    """A call begins."""

    name: str


@dataclass(frozen=True)
class More:
    """More characters of the arguments' JSON."""

    text: str


@dataclass(frozen=True)
class End:
    """The call is whole."""


Step = Begin | More | End


class NoCall(Exception):
    """What came is no call."""


class Reader(ABC):
    """Reads the calls of one block.

    Attributes:
        raw: what came since the last call that was whole.
        begun: whether a call has begun that is not whole.
        ended: the marker that ended the block, and the text behind it; None until then.
    """

    def __init__(self, tools: Mapping[str, Tool], ends: Sequence[str], known: bool):
        """`ends`: markers that end the block as text; `known`: only a call of one of `tools` is a call."""
        self._tools, self._ends, self._known = tools, tuple(ends), known
        self._tail = ""
        self.begun = False
        self.raw = ""
        self.ended: tuple[str, str] | None = None

    def push(self, text: str) -> Iterator[Step]:
        """What is certain with this text. Raises NoCall, but never within a call that has begun."""
        self.raw += text
        return self._read(text)

    def mark(self, marker: str) -> Iterator[Step]:
        """A marker of the form (`Form.marks`) came. Raises NoCall, as `push`."""
        raise NoCall

    @abstractmethod
    def close(self) -> Iterator[Step]:
        """What the block's end makes certain. Raises NoCall, as `push`."""

    @abstractmethod
    def _read(self, text: str) -> Iterator[Step]:
        """See `push`."""

    def _begin(self, name: Any) -> Begin:
        if not isinstance(name, str) or not name or (self._known and name not in self._tools):
            raise NoCall
        self.begun = True
        return Begin(name)

    def _end(self, rest: str) -> End:
        """The call is whole; `rest`: the text behind it that came already."""
        self.begun, self.raw = False, rest
        return End()

    def _beside(self, text: str, i: int) -> int:
        """Take a character between calls, which no call begins with: part of a marker that ends the block. Raises
        NoCall.
        """
        self._tail += text[i]
        if self._tail in self._ends:
            self.ended = (self._tail, text[i + 1 :])
            return len(text)
        if not any(end.startswith(self._tail) for end in self._ends):
            raise NoCall
        return i + 1


class Form(ABC):
    """A way to write a call."""

    @abstractmethod
    def reader(self, tools: Mapping[str, Tool], ends: Sequence[str], known: bool) -> Reader:
        """For one block; arguments as of `Reader`."""

    @abstractmethod
    def rule(self, tool: Tool, marks: Marks) -> str:
        """One call of a tool, as the right side of a rule in llguidance's Lark. Raises InputError where the form cannot
        hold the schema.
        """

    @property
    def marks(self) -> tuple[str, ...]:
        """Texts within a call that may be tokens of their own."""
        return ()

    @property
    def rules(self) -> Sequence[str]:
        """What `rule` names, of the grammar."""
        return ()


class Marks:
    """How a grammar writes a marker: as the token that it is in the vocabulary, or as text."""

    def __init__(self, ids: Mapping[str, int]):
        self._ids = ids

    def __call__(self, text: str) -> str:
        return f"<[{self._ids[text]}]>" if text in self._ids else literal(text)


def literal(text: str) -> str:
    """A string of a grammar; "" for none."""
    if not text:
        return ""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + escaped.replace("\n", "\\n").replace("\r", "\\r").replace("\t", "\\t") + '"'


def json_rule(schema: Any) -> str:
    """JSON that follows a schema, with the whitespace of Python's `json.dumps`, as templates write calls: a small model
    that may write any whitespace writes nothing else.
    """
    told = {} if schema is True else dict(schema)
    told["x-guidance"] = {
        **OPTIONS,
        "whitespace_flexible": False,
        "item_separator": ", ",
        "key_separator": ": ",
    }
    return "%json " + json.dumps(told)
