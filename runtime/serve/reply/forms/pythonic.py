"""Calls as a list of calls of Python: [add(a=1, b="x"), now()]."""

from __future__ import annotations

import ast
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
from accel.runtime.serve.reply.forms.properties import listed, properties_of

_HEAD = re.compile(r"\s*(?:\[\s*(?:(?P<name>[A-Za-z_][\w.]*)\s*(?P<call>\()?)?)?")
_WORDS = {"true": True, "false": False, "null": None}  # of JSON
_BOOLEAN = '("True" | "False")'


@dataclass(frozen=True)
class Pythonic(Form):
    """A list is read once it is whole. Values may be JSON's too."""

    def reader(self, tools: Mapping[str, Tool], ends: Sequence[str], known: bool) -> Reader:
        return _Calls(tools, ends, known)

    def rule(self, tool: Tool, marks: Marks) -> str:
        found = properties_of(tool)
        for name in (tool.name, *(one.name for one in found)):
            if not name.isidentifier():
                raise InputError(
                    f"{tool.name}: {name!r:.80} is no name in Python, as which this model writes it; rename it"
                )
        rules = [
            f"{literal(one.name + '=')} "
            + (_BOOLEAN if one.schema == {"type": "boolean"} else json_rule(one.schema))
            for one in found
        ]
        body = listed(rules, sum(one.required for one in found), ", ")
        return f"{literal(tool.name + '(')} {body} {literal(')')}"


class _Calls(Reader):
    def __init__(self, tools: Mapping[str, Tool], ends: Sequence[str], known: bool):
        super().__init__(tools, ends, known)
        self._text = ""
        self._depth = 0
        self._quote, self._escaped = "", False
        self._sure = self._whole = False  # that it is a list of calls; that it is there

    def close(self) -> Iterator[Step]:
        if not self._whole:
            raise NoCall
        yield from ()

    def _read(self, text: str) -> Iterator[Step]:
        for i, letter in enumerate(text):
            if self.ended is not None:
                return
            if self._whole:
                if self._tail or not letter.isspace():
                    self._beside(text, i)
                continue
            self._text += letter
            if self._within(letter) and letter == "]":
                yield from self._steps(text[i + 1 :])
        if not self._whole and not self._sure:
            self._check_head()

    def _within(self, letter: str) -> bool:
        """Take a character; whether it ends the outermost bracket."""
        if self._quote:
            if self._escaped:
                self._escaped = False
            elif letter == "\\":
                self._escaped = True
            elif letter == self._quote:
                self._quote = ""
        elif letter in "\"'":
            self._quote = letter
        elif letter in "([{":
            self._depth += 1
        elif letter in ")]}":
            self._depth -= 1
            return self._depth == 0
        return False

    def _check_head(self) -> None:
        """Raise NoCall where what came is not the beginning of a list of calls."""
        found = _HEAD.match(self._text)
        assert found is not None
        rest = self._text[found.end() :]
        named = found["name"] is None or not self._known or found["name"] in self._tools
        if (rest and not found["call"]) or (found["call"] and not named):
            raise NoCall
        self._sure = bool(found["call"])

    def _steps(self, rest: str) -> Iterator[Step]:
        """The calls of a list that is whole."""
        source = self._text.strip()
        try:
            tree = ast.parse(source, mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            raise NoCall from None
        if not isinstance(tree, ast.List) or not tree.elts:
            raise NoCall
        calls = [_call(one, source) for one in tree.elts]
        if self._known and not all(name in self._tools for name, _ in calls):
            raise NoCall
        self._whole = True
        for name, arguments in calls:
            yield self._begin(name)
            yield More(arguments)
            yield self._end(rest)


def _call(node: ast.expr, source: str) -> tuple[str, str]:
    """Name and arguments. Raises NoCall."""
    if not isinstance(node, ast.Call) or node.args or any(one.arg is None for one in node.keywords):
        raise NoCall
    if not isinstance(node.func, (ast.Name, ast.Attribute)):
        raise NoCall
    try:
        arguments = {str(one.arg): _value(one.value, source) for one in node.keywords}
        return ast.unparse(node.func), json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):
        raise NoCall from None


def _value(node: ast.expr, source: str) -> Any:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        written = ast.get_source_segment(source, node) or ""
        try:
            return json.loads(written)  # escapes of JSON are not all those of Python
        except ValueError:
            return node.value
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float, type(None))):
        return node.value
    if isinstance(node, ast.Name) and node.id in _WORDS:
        return _WORDS[node.id]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        number = _value(node.operand, source)
        if isinstance(number, (int, float)):
            return -number
    if isinstance(node, (ast.List, ast.Tuple)):
        return [_value(one, source) for one in node.elts]
    if isinstance(node, ast.Dict):
        keys = [None if key is None else _value(key, source) for key in node.keys]
        if all(isinstance(key, str) for key in keys):
            return dict(zip(keys, (_value(v, source) for v in node.values), strict=True))
    raise NoCall
