"""The grammar of a program's text: lines into parts (`tree.py`), of which nothing is looked up yet.

text    = [ "state:" { name ":" type "=" "state" "(" fields ")" } ] { entry { region } }
entry   = name "(" inputs ")" ":" { line }
region  = name "(" inputs ")" ":" { line } [ "otherwise" "(" inputs ")" ":" { line } ]
        | name ":" "as" name [ "of" name ] [ "with" name "=" name { "," name "=" name } ]
line    = name ":" type                                       a weight
        | "%" word [ ":" type ] "=" operator "(" arguments ")"
        | "return" [ output "=" ] value { "," … }
"""

from __future__ import annotations

from typing import Any

from accel.ir.errors import TextError, unknown
from accel.ir.parser.line import Line
from accel.ir.parser.tree import (
    Body,
    Call,
    Input,
    Place,
    Ref,
    Result,
    Section,
    StateLine,
    Tree,
    Weight,
)
from accel.ir.text import WORDS, in_layer


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
