"""The parts of a program's text, as they are written: nothing is looked up yet.

text    = [ "state:" { name ":" type "=" "state" "(" fields ")" } ] { entry { region } }
entry   = name "(" inputs ")" ":" { line }
region  = name "(" inputs ")" ":" { line } [ "otherwise" "(" inputs ")" ":" { line } ]
        | name ":" "as" name [ "of" name ] [ "with" name "=" name { "," name "=" name } ]
line    = name ":" type                                       a weight
        | "%" word [ ":" type ] "=" operator "(" arguments ")"
        | "return" [ output "=" ] value { "," … }
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeVar

import torch

from accel.ir.errors import TextError, unknown
from accel.ir.text import NAME, NUMBER, WORDS, in_layer

_TOKEN = re.compile(
    rf"(?P<value>%\w+)|(?P<string>'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\")"
    rf"|(?P<number>(?:{NUMBER.pattern})(?![\w.{{]))|(?P<name>{NAME.pattern})|(?P<mark>[()\[\],:=])"
)
_LITERALS = {"None": None, "True": True, "False": False}
T = TypeVar("T")


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

    def fail(self, wanted: str) -> NoReturn:
        found = _TOKEN.match(self.rest)
        shown = f"'{found.group() if found else self.rest[:1]}'" if self.rest else "the line ends"
        raise self.at.error(f"{shown}, where {wanted} should stand")

    def take(self, mark: str) -> bool:
        """Whether a mark, or a whole word, comes next; it is passed."""
        if not self.rest.startswith(mark):
            return False
        if mark[-1].isalnum() and re.match(r"[\w.{]", self.rest[len(mark) :]):
            return False
        self.position += len(mark)
        self.space()
        return True

    def expect(self, mark: str, wanted: str = "") -> None:
        if not self.take(mark):
            self.fail(wanted or f"'{mark}'")

    def token(self, kind: str, wanted: str) -> str:
        found = _TOKEN.match(self.rest)
        if found is None or found.lastgroup != kind:
            self.fail(wanted)
        self.position += found.end()
        self.space()
        return found.group()

    def name(self, wanted: str) -> str:
        return self.token("name", wanted)

    def end(self) -> None:
        if self.rest:
            self.fail("the line's end")

    def listed(self, close: str, one: Callable[[], T]) -> list[T]:
        """What stands between commas, up to a mark that closes it."""
        found: list[T] = []
        while not self.take(close):
            if found:
                self.expect(",", f"',' or '{close}'")
            found.append(one())
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

        def one() -> None:
            name = self.name("the name of an argument")
            self.expect("=")
            found[name] = self.value()

        self.listed(")", one)
        return found

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """`x, 1, dim=2)`: an open bracket was passed."""
        args: list[Any] = []
        kwargs: dict[str, Any] = {}

        def one() -> None:
            named = re.match(r"([A-Za-z_]\w*)\s*=", self.rest)
            if named:
                self.name("")
                self.expect("=")
                kwargs[named[1]] = self.value()
            elif kwargs:
                self.fail("an argument with its name (those without come first)")
            else:
                args.append(self.value())

        self.listed(")", one)
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


def read_tree(text: str) -> Tree:
    """A text by its grammar.

    Raises:
        TextError: with line and column, what stands there, and what should.
    """
    tree, state = Tree(), False
    section: Section | None = None
    regions: dict[str, Section] = {}
    for number, raw in enumerate(text.splitlines(), 1):
        line = Line(raw.rstrip(), number)
        if not line.rest or line.rest.startswith("#"):
            continue
        if not raw[0].isspace():
            _whole(section)
            state = line.rest == "state:"
            if state:
                section = None
                continue
            section = _opened(line, tree, regions)
            continue
        if state:
            tree.state.append(_state(line))
        elif section is None:
            raise line.at.error(
                "this line is indented and belongs to no entry; begin with one, such as "
                "step(tokens: i64[B,T], positions: i64[B,T]):"
            )
        elif line.take("otherwise"):
            _whole(section)
            if section.is_entry:
                raise line.at.error("an entry has no 'otherwise'; a region may have one")
            if len(section.bodies) > 1:
                raise line.at.error(f"{section.name} has one 'otherwise'; take this one out")
            line.expect("(")
            section.bodies.append(_header(line))
        else:
            _line(line, section.bodies[-1], section)
        regions = _filed(tree, section, regions)
    _whole(section)
    if not tree.entries:
        raise TextError("the text has no entry; it begins with step(tokens: i64[B,T], …):")
    return tree


def _opened(line: Line, tree: Tree, regions: dict[str, Section]) -> Section | None:
    """The section whose first line this is; none where it is like another and so whole."""
    at = line.at
    name = line.name("an entry or a region, such as step(…): or layer.0(…):")
    if name in WORDS:
        raise at.error(f"'{name}' is no name for an entry or a region; choose another")
    if line.take("("):
        return Section(name, at, [_header(line)])
    line.expect(":", f"'(' and the inputs of '{name}'")
    line.expect(
        "as", f"'as' and the region that {name} is like; or ({name}'s inputs) before the ':'"
    )
    regions[name] = _like(line, name, at, tree, regions)
    return None


def _filed(tree: Tree, section: Section | None, regions: dict[str, Section]) -> dict[str, Section]:
    """Put a section that is whole where it belongs; the regions of the newest entry."""
    if section is None or section.bodies[-1].results is None:
        return regions
    if section.is_entry:
        if section.name in tree.entries:
            raise section.at.error(f"there are two entries '{section.name}'; name one otherwise")
        regions = {}
        tree.entries[section.name] = section, regions
    elif not tree.entries:
        first = section.bodies[0].results[0].value if section.bodies[0].results else None
        raise (first.at if first else section.at).error(
            f"{section.name} returns values without names and no entry stands before it: write "
            "return logits=… in an entry, and regions after the entry that calls them"
        )
    elif regions.get(section.name, section) is not section:
        raise section.at.error(f"there are two regions '{section.name}'; name one otherwise")
    else:
        regions[section.name] = section
    return regions


def _header(line: Line) -> Body:
    inputs = line.listed(")", line.input)
    line.expect(":", "':' after the inputs")
    line.end()
    names: set[str] = set()
    for given in inputs:
        if given.name in names:
            raise given.at.error(f"there are two inputs '{given.name}'; name one otherwise")
        names.add(given.name)
    return Body(inputs)


def _whole(section: Section | None) -> None:
    if section is not None and section.bodies[-1].results is None:
        raise section.at.error(f"{section.name} returns nothing; end it with a line 'return …'")


def _line(line: Line, body: Body, section: Section) -> None:
    """A weight, a call or the end of a body."""
    if body.results is not None:
        raise line.at.error(f"{section.name} has returned; a line of another begins with its name")
    at = line.at
    if line.take("return"):
        body.results = []
        while line.rest:
            if body.results:
                line.expect(",")
            body.results.append(_result(line))
        if len({bool(r.output) for r in body.results}) > 1:
            raise at.error("name each output, as in an entry, or none, as in a region")
        return
    if not line.rest.startswith("%"):
        name = line.name("a weight (name: type), a value (%0: type = …) or 'return'")
        line.expect(":", f"':' and the type of weight '{name}'")
        body.lines.append(Weight(name, line.type(), at, name))
        line.end()
        return
    value = line.token("value", "")
    kind = line.type() if line.take(":") else None
    line.expect("=", f"'=' and the operator that gives {value}")
    at = line.at
    operator = line.name("an operator, such as add.Tensor or accel.rope")
    line.expect("(", f"'(' and the arguments of {operator}")
    args, kwargs = line.arguments()
    line.end()
    if operator == "weight":
        if kind is None or kwargs or len(args) != 1 or not isinstance(args[0], str):
            raise at.error(f"write a weight as {value}: f32[48] = weight('name')")
        body.lines.append(Weight(args[0], kind, at, value))
    else:
        body.lines.append(Call(value, kind, operator, args, kwargs, at))


def _result(line: Line) -> Result:
    at = line.at
    found = line.value()
    if not isinstance(found, Ref):
        raise at.error("what is returned is a value (%0), an input or a weight")
    if not line.take("="):
        return Result("", found)
    at, value = line.at, line.value()
    if not isinstance(value, Ref):
        raise at.error("what is returned is a value (%0), an input or a weight")
    return Result(found.name, value)


def _state(line: Line) -> StateLine:
    at = line.at
    name = line.name("the name of a state value")
    line.expect(":")
    kind = line.type()
    line.expect("=")
    line.expect("state")
    line.expect("(")
    fields = line.fields()
    line.end()
    return StateLine(name, kind, fields, at)


def _like(line: Line, name: str, at: Place, tree: Tree, regions: dict[str, Section]) -> Section:
    """`layer.0 of step with a = b`: that region again, with names of its own."""
    place = line.at
    other = line.name("a region")
    known = regions
    if line.take("of"):
        where, owner = line.at, line.name("an entry")
        if owner not in tree.entries:
            raise where.error(unknown("entry", owner, tree.entries))
        known = tree.entries[owner][1]
    if other not in known:
        raise place.error(unknown("region", other, known) + "; it has to stand above")
    names: dict[str, str] = {}
    if line.take("with"):
        while line.rest:
            if names:
                line.expect(",")
            before = line.name("a name")
            line.expect("=")
            names[before] = line.name("a name")
    line.end()
    if not tree.entries:
        raise at.error(f"no entry stands before region '{name}'")
    return Section(name, at, [_again(b, other, name, names) for b in known[other].bodies])


def _again(body: Body, before: str, after: str, names: dict[str, str]) -> Body:
    """A body with the names of another layer."""

    def new(name: str) -> str:
        return names.get(name) or in_layer(name, before, after)

    def argument(value: Any) -> Any:
        if isinstance(value, list):
            return [argument(v) for v in value]
        if isinstance(value, Ref) and not value.name.startswith("%"):
            return Ref(new(value.name), value.at)
        return value

    inputs = [Input(new(i.name), i.type, i.at, i.default) for i in body.inputs]
    lines: list[Weight | Call] = []
    for line in body.lines:
        if isinstance(line, Weight):
            lines.append(Weight(new(line.name), line.type, line.at, new(line.bound)))
        else:
            args = tuple(argument(a) for a in line.args)
            kwargs = {k: argument(v) for k, v in line.kwargs.items()}
            operator = new(line.operator)  # a region
            lines.append(Call(line.value, line.type, operator, args, kwargs, line.at))
    results = [Result(r.output, argument(r.value)) for r in body.results or []]
    return Body(inputs, lines, results)
