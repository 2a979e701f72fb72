"""Calls as tags, with each argument as plain text: <function=add><parameter=a>1</parameter></function>."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

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
from accel.runtime.serve.reply.forms.properties import (
    Property,
    is_text,
    properties_of,
    values_of,
)

_FUNCTION = re.compile(r"\s*<function=([^<>\n]{1,200})>")
_PARAMETER = re.compile(r"\s*<parameter=([^<>\n]{1,200})>\n?")
_VALUE_END, _END = "</parameter>", "</function>"
_OPENS = ("<function=", "<parameter=", _END)
_SAID = {"type", "description", "title", "default", "examples", "enum", "const"}  # of a plain text


@dataclass(frozen=True)
class Tags(Form):
    """A value is text where the schema says "string", else JSON; text where it is none."""

    def reader(self, tools: Mapping[str, Tool], ends: Sequence[str], known: bool) -> Reader:
        return _Tags(tools, ends, known)

    def rule(self, tool: Tool, marks: Marks) -> str:
        lines = []
        for part in properties_of(tool):
            if re.search(r"[<>\n]", part.name):
                raise InputError(
                    f"{tool.name}: the name {part.name!r:.80} cannot stand in a tag; rename the parameter"
                )
            value = _value_rule(tool, part)
            line = f"{literal(f'<parameter={part.name}>' + _LINE)} {value} "
            line += literal(_LINE if value == _FREE else f"{_LINE}{_VALUE_END}{_LINE}")
            lines.append(line if part.required else f"({line})?")
        head = literal(f"<function={tool.name}>" + _LINE)
        return f"{head} {' '.join(lines)} {literal(_END)}"

    @property
    def rules(self) -> Sequence[str]:
        return [rf'{_FREE}[suffix="\n{_VALUE_END}"]: /(.|\n)*/']


_FREE = "free_text"
_LINE = "\n"


def _value_rule(tool: Tool, part: Property) -> str:
    """The right side of a rule for a value. Raises InputError."""
    if not is_text(part.schema):
        return json_rule(part.schema)
    if more := sorted(part.schema.keys() - _SAID):
        raise InputError(
            f"{tool.name}: {part.name} has {more[0]!r}, which this model's calls cannot hold a text to, since they "
            "write it without quotes; leave it out"
        )
    values = values_of(part.schema)
    if values is None:
        return _FREE
    return "(" + " | ".join(literal(value) or '""' for value in values) + ")"


class _Tags(Reader):
    def __init__(self, tools: Mapping[str, Tool], ends: Sequence[str], known: bool):
        super().__init__(tools, ends, known)
        self._buffer = ""
        self._seen = 0  # of a value: where its end is not
        self._key: str | None = None
        self._name = ""
        self._parameters = self._calls = 0

    def close(self) -> Iterator[Step]:
        if self.begun:
            yield More("}")
            yield self._end("")
        elif not self._calls or self._buffer.strip():
            raise NoCall

    def _read(self, text: str) -> Iterator[Step]:
        self._buffer += text
        while self.ended is None:
            if not self.begun:
                found = _FUNCTION.match(self._buffer)
                if found is None:
                    self._outside()
                    return
                yield self._begin(found[1])
                yield More("{")
                self._name, self._parameters = found[1], 0
                self._buffer = self._buffer[found.end() :]
            elif self._key is not None:
                end = self._buffer.find(_VALUE_END, self._seen)
                if end < 0:
                    self._seen = max(0, len(self._buffer) - len(_VALUE_END))
                    return
                value = self._buffer[:end].removesuffix("\n")
                comma = ", " if self._parameters else ""
                yield More(
                    f"{comma}{json.dumps(self._key, ensure_ascii=False)}: {self._json(self._key, value)}"
                )
                self._parameters += 1
                self._key, self._buffer = None, self._buffer[end + len(_VALUE_END) :]
            elif found := _PARAMETER.match(self._buffer):
                if found.end() == len(self._buffer) and not found[0].endswith("\n"):
                    return  # a line's end may follow
                self._key, self._seen = found[1], 0
                self._buffer = self._buffer[found.end() :]
            elif self._buffer.lstrip().startswith(_END):
                self._buffer = self._buffer.lstrip()[len(_END) :]
                self._calls += 1
                yield More("}")
                yield self._end(self._buffer)
            elif (place := self._buffer.find("<")) < 0 or _may_be_tag(self._buffer[place:]):
                return
            else:  # what stands between parameters means nothing
                self._buffer = self._buffer[place + 1 :]

    def _outside(self) -> None:
        """Between calls. Raises NoCall."""
        text = self._buffer.lstrip()
        if not text or _may_be_tag(text):
            return
        self._tail, i = "", 0
        while i < len(text):
            i = self._beside(text, i)
        if self.ended is not None:
            self._buffer = ""

    def _json(self, key: str, value: str) -> str:
        tool = self._tools.get(self._name)
        properties = tool.schema.get("properties", {}) if tool else {}
        if not is_text(properties.get(key)):
            try:
                return json.dumps(json.loads(value), ensure_ascii=False, allow_nan=False)
            except (ValueError, RecursionError):
                pass
        return json.dumps(value, ensure_ascii=False)


def _may_be_tag(text: str) -> bool:
    """Whether a tag may begin with it, or it begins one that has no end yet."""
    return any(
        tag.startswith(text) or (text.startswith(tag) and ">" not in text and len(text) < 240)
        for tag in _OPENS
    )
