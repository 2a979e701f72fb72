"""Calls as JSON objects, one or more, alone or in a list: {"name": "add", "arguments": {"a": 1}}."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from accel.runtime.serve.reply.forms import (
    Form,
    Marks,
    More,
    NoCall,
    Reader,
    Step,
    Tool,
    json_rule,
    literal,
)

_SPACE = " \t\r\n"
_APART = _SPACE + "[],;"  # between calls
_BESIDE = ("id", "type")  # other keys of a call


@dataclass(frozen=True)
class JsonObject(Form):
    """`name`, `arguments`: keys of a call."""

    name: str = "name"
    arguments: str = "arguments"

    def reader(self, tools: Mapping[str, Tool], ends: Sequence[str], known: bool) -> Reader:
        return _Objects(self, tools, ends, known)

    def rule(self, tool: Tool, marks: Marks) -> str:
        head = f"{{{json.dumps(self.name)}: {json.dumps(tool.name)}, {json.dumps(self.arguments)}: "
        return f"{literal(head)} {json_rule(tool.schema)} {literal('}')}"


class Value:
    """Finds the end of a JSON value that comes in pieces."""

    def __init__(self) -> None:
        self._depth = 0
        self._string = self._escaped = False

    def end(self, text: str, start: int) -> int | None:
        """Where the value ends; None: not in this text."""
        for i in range(start, len(text)):
            letter = text[i]
            if self._string:
                if self._escaped:
                    self._escaped = False
                elif letter == "\\":
                    self._escaped = True
                elif letter == '"':
                    self._string = False
                    if not self._depth:
                        return i + 1
            elif letter == '"':
                self._string = True
            elif letter in "{[":
                self._depth += 1
            elif letter in "}]":
                if self._depth <= 1:
                    return i + self._depth
                self._depth -= 1
            elif not self._depth and letter in ", \t\r\n":
                return i
        return None


class _Objects(Reader):
    def __init__(
        self, form: JsonObject, tools: Mapping[str, Tool], ends: Sequence[str], known: bool
    ):
        super().__init__(tools, ends, known)
        self._form = form
        self._place = "outside"
        self._calls = 0
        self._new()

    def close(self) -> Iterator[Step]:
        if self.begun:
            yield self._end("")
        elif self._place != "outside" or not self._calls:
            raise NoCall

    def _new(self) -> None:
        """Before an object."""
        self._name: Any = None
        self._arguments: str | None = None  # whole, where the name comes behind them
        self._key = self._held = ""
        self._value = Value()
        self.begun = False

    def _read(self, text: str) -> Iterator[Step]:
        i = 0
        while i < len(text):
            letter = text[i]
            if self._place in ("key text", "value"):
                end = self._value.end(text, i)
                yield from self._more(text[i:end])
                if end is not None:
                    yield from self._whole()
                i = len(text) if end is None else end
            elif self._place == "over":  # what follows the arguments of a call means nothing
                return
            elif self._place == "outside" and letter == "{" and not self._tail:
                self._place = "key"
                i += 1
            elif self._place == "outside" and (self._tail or letter not in _APART):
                i = self._beside(text, i)
            elif letter in _APART if self._place == "outside" else letter in _SPACE:
                i += 1
            elif self._place == "before value":
                self._begin_value(letter)
                if self._streams and self._name is not None:
                    yield self._begin(self._name)
            elif self._place == "key" and letter == "}":
                yield from self._object_end(text[i + 1 :])
                i += 1
            else:
                i += self._sign(letter)

    def _sign(self, letter: str) -> int:
        """A character between keys and values; how many are taken."""
        if self._place == "key" and letter == ",":
            return 1
        if self._place == "key" and letter == '"':
            self._place, self._value, self._held = "key text", Value(), ""
            return 0
        if self._place == "colon" and letter == ":":
            self._place = "before value"
            return 1
        if not self.begun:
            raise NoCall
        self._place = "over"
        return 0

    def _begin_value(self, letter: str) -> None:
        self._place, self._value, self._held = "value", Value(), ""
        self._streams = self._key == self._form.arguments and letter == "{" and not self.begun

    def _more(self, text: str) -> Iterator[Step]:
        if self._place == "value" and self._streams and self.begun:
            yield More(text)
        else:
            self._held += text

    def _whole(self) -> Iterator[Step]:
        """A key or value has ended."""
        if self._place == "key text":
            self._key, self._place = str(_parsed(self._held)), "colon"
            own = (self._form.name, self._form.arguments, *_BESIDE)
            if self._known and not self.begun and self._key not in own:
                raise NoCall
            return
        self._place = "key"
        if self.begun:
            return
        if self._key == self._form.name:
            self._name = _parsed(self._held)
        elif self._key == self._form.arguments:
            self._arguments = self._held if self._held[:1] == "{" else _object(self._held)
        if self._name is not None and self._arguments is not None:
            yield self._begin(self._name)
            yield More(self._arguments)

    def _object_end(self, rest: str) -> Iterator[Step]:
        if not self.begun:
            if self._name is None or self._known:
                raise NoCall
            yield self._begin(self._name)
            yield More("{}")
        yield self._end(rest)
        self._calls += 1
        self._new()
        self._place = "outside"


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise NoCall from None


def _object(text: str) -> str:
    """Arguments that are no object: the text of one, or none at all. Raises NoCall."""
    found = _parsed(text)
    if found is None:
        return "{}"
    if not isinstance(found, str) or not isinstance(_parsed(found), dict):
        raise NoCall
    return found
