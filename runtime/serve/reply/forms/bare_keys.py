"""Calls with bare keys, whose texts stand between marks: call:add{a:1,b:<escape>x<escape>}."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from accel.ir.errors import InputError
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
from accel.runtime.serve.reply.forms.properties import is_text, listed, properties_of, values_of

_HEAD = re.compile(r"\s*call:\s*([^\s{}:<>]{1,200})\{")
_BEGUN = re.compile(r"\s*(c(a(l(l(:(\s*[^\s{}:<>]{0,200})?)?)?)?)?)?")
_KEY = re.compile(r"[^\s{}\[\]:,<>|\"]+")
_NOTES = {"description", "title", "default", "examples"}
_SCALARS = ("integer", "number", "boolean", "null")
_WORDS = {"None": "null", "True": "true", "False": "false"}  # as Jinja writes them
_ENDS = {"{": "}", "[": "]"}
_FREE = "marked_text"
_HALF = "\ufffd"


@dataclass(frozen=True)
class BareKeys(Form):
    """`quote`: the mark before and behind each text."""

    quote: str

    def reader(self, tools: Mapping[str, Tool], ends: Sequence[str], known: bool) -> Reader:
        return _BareKeys(tools, ends, known)

    def rule(self, tool: Tool, marks: Marks) -> str:
        return f"{literal(f'call:{tool.name}')} {_Rules(self.quote, marks, tool).object_of(tool.schema)}"

    @property
    def marks(self) -> tuple[str, ...]:
        return (self.quote,)

    @property
    def rules(self) -> Sequence[str]:
        return [rf"{_FREE}[suffix={literal(self.quote)}]: /(.|\n)*/"]


@dataclass(frozen=True)
class _Rules:
    """The rules of a grammar for values as this form writes them. All raise InputError for what it cannot hold."""

    quote: str
    marks: Marks
    tool: Tool

    def object_of(self, schema: Mapping[str, Any]) -> str:
        """An object of these properties."""
        found = properties_of(Tool(self.tool.name, schema))
        for one in found:
            if not _KEY.fullmatch(one.name):
                raise self._refused(
                    f"the name {one.name!r:.80} cannot stand without quotes; rename it"
                )
        rules = [f"{literal(f'{one.name}:')} {self._value(one.schema)}" for one in found]
        return f'"{{" {listed(rules, sum(one.required for one in found), ",")} "}}"'

    def _value(self, schema: Any) -> str:
        if not isinstance(schema, Mapping):
            raise self._refused("a schema without a type cannot be held to; give one")
        if (values := values_of(schema)) is not None:
            return "(" + " | ".join(map(self._written, values)) + ")"
        if "anyOf" in schema and not schema.keys() - _NOTES - {"anyOf"}:
            return "(" + " | ".join(map(self._value, schema["anyOf"])) + ")"
        kind = schema.get("type")
        if isinstance(kind, list):
            return "(" + " | ".join(self._value({**schema, "type": one}) for one in kind) + ")"
        if kind in _SCALARS:
            return json_rule(schema)
        if kind == "object":
            return self.object_of({key: schema[key] for key in schema if key not in _NOTES})
        if kind == "array" and "items" in schema:
            return self._array(schema)
        if is_text(schema) and not (more := sorted(schema.keys() - _NOTES - {"type"})):
            quote = literal(self.quote)
            mark = self.marks(self.quote)
            return f"{quote} {_FREE}" if mark == quote else f"{mark} /(.|\\n)*/ {mark}"
        told = f"{more[0]!r:.80} of a text" if is_text(schema) else f"a schema of type {kind!r:.80}"
        raise self._refused(f"{told} cannot be held to by this model's calls; leave it out")

    def _array(self, schema: Mapping[str, Any]) -> str:
        if more := sorted(schema.keys() - _NOTES - {"type", "items", "minItems", "maxItems"}):
            raise self._refused(f"{more[0]!r:.80} of a list cannot be held to; leave it out")
        least, most, item = (
            schema.get("minItems", 0),
            schema.get("maxItems"),
            self._value(schema["items"]),
        )
        rest = f'("," {item})' + (
            f"{{{max(least - 1, 0)},}}" if most is None else f"{{{max(least - 1, 0)},{most - 1}}}"
        )
        items = "" if most == 0 else f"{item} {rest}" if most != 1 else item
        return f'"[" ({items}){"" if least else "?"} "]"' if items else '"[]"'

    def _written(self, value: Any) -> str:
        """The rule for one value."""
        if isinstance(value, str):
            mark = self.marks(self.quote)
            return f"({mark} {literal(value)} {mark})"
        if isinstance(value, Mapping | list):
            raise self._refused(
                "a value that is an object or a list cannot be held to; leave it out"
            )
        return literal(json.dumps(value))

    def _refused(self, why: str) -> InputError:
        return InputError(f"{self.tool.name}: {why}")


class _BareKeys(Reader):
    def __init__(self, tools: Mapping[str, Tool], ends: Sequence[str], known: bool):
        super().__init__(tools, ends, known)
        self._held = ""  # a head, key or value so far
        self._open: list[str] = []  # the brackets that are open
        self._place = "head"
        self._text = False  # whether the place is within a text
        self._calls = 0

    def mark(self, marker: str) -> Iterator[Step]:
        if not self.begun:
            raise NoCall
        self.raw += marker
        if self._place == "value":
            if not self._text:
                self._text, self._held = True, ""
                yield More('"')
            else:
                self._text, self._place = False, "after"
                yield More(_escaped(self._held) + '"')
                self._held = ""
        elif self._place == "key":
            self._text = not self._text

    def close(self) -> Iterator[Step]:
        if self.begun:
            if self._text and self._place == "value":
                yield More(_escaped(self._held) + '"')
            else:
                yield from self._scalar()
            yield More("".join(_ENDS[one] for one in reversed(self._open)))
            yield self._end("")
        elif not self._calls or self._held.strip():
            raise NoCall

    def _read(self, text: str) -> Iterator[Step]:
        i = 0
        while i < len(text):
            letter = text[i]
            if self._place == "head" and self._calls:
                i = i + 1 if letter.isspace() and not self._tail else self._beside(text, i)
            elif self._place == "head":
                i += 1
                yield from self._head(letter)
            elif self._text and self._place == "value":
                yield from self._more(text[i:])
                return
            else:
                i += 1
                yield from self._sign(letter, text[i:])

    def _more(self, text: str) -> Iterator[Step]:
        """More of a text. Half a character, which may be where a reply is cut off, waits for what is behind it."""
        text = self._held + text
        sure = text.removesuffix(_HALF)
        self._held = text[len(sure) :]
        if sure:
            yield More(_escaped(sure))

    def _head(self, letter: str) -> Iterator[Step]:
        """Raises NoCall."""
        self._held += letter
        if found := _HEAD.fullmatch(self._held):
            yield self._begin(found[1])
            self._held = ""
            yield from self._opened("{")
        elif not _BEGUN.fullmatch(self._held):
            raise NoCall

    def _opened(self, bracket: str) -> Iterator[Step]:
        self._open.append(bracket)
        self._place = "key" if bracket == "{" else "value"
        yield More(bracket)

    def _sign(self, letter: str, rest: str) -> Iterator[Step]:
        """A character outside of texts; `rest`: what is behind it."""
        if self._text or (self._place == "key" and letter not in ":}"):
            self._held += letter if self._text or letter not in ", \n" else ""
        elif self._place == "key" and letter == ":":
            yield More(f"{json.dumps(self._held.strip(), ensure_ascii=False)}: ")
            self._held, self._place = "", "value"
        elif self._place == "value" and letter in "{[" and not self._held.strip():
            self._held = ""
            yield from self._opened(letter)
        elif letter == ",":
            yield from self._scalar()
            self._place = "key" if self._open[-1] == "{" else "value"
            yield More(", ")
        elif letter in "}]":
            yield from self._scalar()
            yield More(_ENDS[self._open.pop()])
            self._place = "after"
            if not self._open:
                self._place, self._calls = "head", 1
                yield self._end(rest)
        elif self._place == "value":
            self._held += letter

    def _scalar(self) -> Iterator[Step]:
        """A value that is no text has ended, if one was there."""
        held, self._held = self._held.strip(), ""
        if self._place != "value" or not held:
            return
        try:
            json.loads(found := _WORDS.get(held, held))
        except (ValueError, RecursionError):
            found = json.dumps(held, ensure_ascii=False)
        yield More(found)


def _escaped(text: str) -> str:
    """A part of a text as JSON has it within its quotes."""
    return json.dumps(text, ensure_ascii=False)[1:-1]
