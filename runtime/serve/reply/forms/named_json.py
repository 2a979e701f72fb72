"""Calls as a name, a marker and the arguments' JSON: add[ARGS]{"a": 1}."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

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
from accel.runtime.serve.reply.forms.json_object import Value

_LONGEST = 200  # characters of a name


@dataclass(frozen=True)
class NamedJson(Form):
    """`between`: what stands between a name and its arguments; `note`: what stands before that, and means nothing."""

    between: str
    note: tuple[str, ...] = ()

    def reader(self, tools: Mapping[str, Tool], ends: Sequence[str], known: bool) -> Reader:
        return _Named(tools, ends, known)

    def rule(self, tool: Tool, marks: Marks) -> str:
        head = " ".join(marks(text) for text in (*self.note, self.between))
        return f"{literal(tool.name)} {head} {json_rule(tool.schema)}"

    @property
    def marks(self) -> tuple[str, ...]:
        return (self.between,)


class _Named(Reader):
    def __init__(self, tools: Mapping[str, Tool], ends: Sequence[str], known: bool):
        super().__init__(tools, ends, known)
        self._name = ""
        self._value: Value | None = None
        self._over = False

    def mark(self, marker: str) -> Iterator[Step]:
        if self.begun or self._over:
            return
        yield self._begin(self._name.strip())
        self._value = Value()

    def close(self) -> Iterator[Step]:
        if self.begun:
            yield self._end("")
        elif not self._over:
            raise NoCall

    def _read(self, text: str) -> Iterator[Step]:
        i = 0
        while i < len(text):
            if self._over:
                i = i + 1 if text[i].isspace() and not self._tail else self._beside(text, i)
            elif self._value is None:
                self._name += text
                if len(self._name) > _LONGEST or "\n" in self._name.strip():
                    raise NoCall
                return
            else:
                end = self._value.end(text, i)
                yield More(text[i:end])
                i = len(text) if end is None else end
                if end is not None:
                    self._over = True
                    yield self._end(text[end:])
