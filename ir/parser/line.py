"""One line of a program's text, read from left to right: names, types, values, arguments."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import torch

from accel.ir.parser.tree import (
    Input,
    Place,
    Ref,
    Type,
)
from accel.ir.text import NAME, NUMBER

_TOKEN = re.compile(
    rf"(?P<value>%\w+)|(?P<string>'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\")"
    rf"|(?P<number>(?:{NUMBER.pattern})(?![\w.{{]))|(?P<name>{NAME.pattern})|(?P<mark>[()\[\],:=])"
)
_LITERALS = {"None": None, "True": True, "False": False}
T = TypeVar("T")


class Line:
    """One line, read from left to right."""

    def __init__(self, text: str, number: int):
        self.text, self.number, self.position = text, number, 0
        self.space()

    def space(self) -> None:
        while self.position < len(self.text) and self.text[self.position].isspace():
            self.position += 1

    @property
    def at(self) -> Place:
        return Place(self.number, self.position + 1)

    @property
    def rest(self) -> str:
        return self.text[self.position :]

    def fail(self, expected: str) -> NoReturn:
        found = _TOKEN.match(self.rest)
        shown = f"'{found.group() if found else self.rest[:1]}'" if self.rest else "the line ends"
        raise self.at.error(f"{shown}, where {expected} should stand")

    def take(self, mark: str) -> bool:
        """Whether a mark, or a whole word, comes next; it is passed."""
        if not self.rest.startswith(mark):
            return False
        if mark[-1].isalnum() and re.match(r"[\w.{]", self.rest[len(mark) :]):
            return False
        self.position += len(mark)
        self.space()
        return True

    def expect(self, mark: str, expected: str = "") -> None:
        if not self.take(mark):
            self.fail(expected or f"'{mark}'")

    def token(self, kind: str, expected: str) -> str:
        found = _TOKEN.match(self.rest)
        if found is None or found.lastgroup != kind:
            self.fail(expected)
        self.position += found.end()
        self.space()
        return found.group()

    def name(self, expected: str) -> str:
        return self.token("name", expected)

    def end(self) -> None:
        if self.rest:
            self.fail("the line's end")

    def listed(self, close: str, item: Callable[[], T]) -> list[T]:
        """What stands between commas, up to a mark that closes it."""
        found: list[T] = []
        while not self.take(close):
            if found:
                self.expect(",", f"',' or '{close}'")
            found.append(item())
        return found

    def type(self) -> Type:
        """`f32[B,T,48]`, `(f32[B], int)`, or a word."""
        at = self.at
        if self.take("("):
            parts = self.listed(")", self.type)
            return Type("(" + ", ".join(p.text for p in parts) + ")", at)
        dtype = self.name("a type, such as f32[B,T,48] or int")
        if not self.rest.startswith("["):
            return Type(dtype, at)
        inside, bracket, _ = self.rest[1:].partition("]")
        if not bracket:
            raise self.at.error("this '[' is not closed; write the sizes as in f32[B,T,48]")
        self.position += len(inside) + 2
        self.space()
        sizes = tuple(split_sizes(inside.replace(" ", "")))
        return Type(f"{dtype}[{','.join(sizes)}]", at, dtype, sizes)

    def value(self) -> Any:
        """An argument: a number, text, a list, what torch names, or a reference."""
        at = self.at
        if self.take("["):
            return self.listed("]", self.value)
        found = _TOKEN.match(self.rest)
        kind = found.lastgroup if found else None
        if kind == "string":
            return ast.literal_eval(self.token("string", ""))
        if kind == "number":
            text = self.token("number", "")
            return int(text) if text.lstrip("-").isdigit() else float(text)
        if kind == "value":
            return Ref(self.token("value", ""), at)
        text = self.name("a value: a number, 'text', [a list], %0, an input or a weight")
        if text in _LITERALS:
            return _LITERALS[text]
        if text == "device" and self.rest.startswith("("):
            return self._device(at)
        if text.startswith("torch."):
            made = getattr(torch, text.removeprefix("torch."), None)
            if not isinstance(made, (torch.dtype, torch.layout, torch.memory_format)):
                raise at.error(f"'{text}' is no dtype, layout or memory format of torch")
            return made
        return Ref(text, at)

    def _device(self, at: Place) -> torch.device:
        self.expect("(")
        given = self.fields()
        try:
            return torch.device(**given)
        except (TypeError, RuntimeError):
            raise at.error("write a device as device(type='cpu')") from None

    def fields(self) -> dict[str, Any]:
        """`a=1, b='x')`: an open bracket was passed."""
        found: dict[str, Any] = {}

        def argument() -> None:
            name = self.name("the name of an argument")
            self.expect("=")
            found[name] = self.value()

        self.listed(")", argument)
        return found

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """`x, 1, dim=2)`: an open bracket was passed."""
        args: list[Any] = []
        kwargs: dict[str, Any] = {}

        def argument() -> None:
            named = re.match(r"([A-Za-z_]\w*)\s*=", self.rest)
            if named:
                self.name("")
                self.expect("=")
                kwargs[named[1]] = self.value()
            elif kwargs:
                self.fail("an argument with its name (those without come first)")
            else:
                args.append(self.value())

        self.listed(")", argument)
        return tuple(args), kwargs

    def input(self) -> Input:
        at = self.at
        name = self.name("the name of an input")
        self.expect(":", f"':' and the type of '{name}'")
        kind = self.type()
        return Input(name, kind, at, self.value() if self.take("=") else None)


def split_sizes(text: str) -> list[str]:
    """Sizes between commas that stand in no brackets."""
    found, depth = [""], 0
    for letter in text:
        depth += {"(": 1, ")": -1}.get(letter, 0)
        if letter == "," and not depth:
            found.append("")
        else:
            found[-1] += letter
    return found if text else []
