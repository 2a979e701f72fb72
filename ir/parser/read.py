"""The text of a program back into a program, which runs.

Shapes are not taken from the text: each operator is run on the fake values of its operands, as
passes do, and what comes out is held against the type that is written.
"""

from __future__ import annotations

import ast
import builtins
import math
import operator
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.node import map_aggregate

from accel.ir.errors import TextError, unknown
from accel.ir.facts import Facts
from accel.ir.parser.syntax import read_tree
from accel.ir.parser.tree import (
    Body,
    Call,
    Input,
    Place,
    Ref,
    Section,
    StateLine,
    Tree,
    Type,
    Weight,
)
from accel.ir.program import Program, State, symbolic_size
from accel.ir.region import Conditional, Entry, Region
from accel.ir.text import HOME, SHORT, STATE_FIELDS, function_name, type_text
from accel.ir.weights import Weights

_DTYPES = {short: dtype for dtype, short in SHORT.items()}
_MODULES = {"operator": operator, "math": math, "torch": torch, "builtins": builtins}
_LETTER = re.compile(r"[A-Za-z]\w*(/[1-9]\d*)?")
_EXAMPLES = 23  # sizes while shapes are worked out: from here on, all unlike
_CONTEXT = 128


def parse(
    text: str, *, facts: Facts | None = None, params: Mapping[str, Tensor] | None = None
) -> Program:
    """The program that `Program.text()` wrote, or a person.

    Args:
        facts: what a text does not hold. Without them: a vocabulary as wide as the logits, and a
            context of 128 tokens.
        params: weights by name. Others are made: noise that depends on the name alone, and zeros
            where they are whole numbers or truth values.

    Raises:
        TextError: with line and column, the thing, the near name, and what to write there.
    """
    return _Reader(read_tree(text), params or {}).program(facts)


class _Reader:
    """A tree of parts -> a program."""

    def __init__(self, tree: Tree, weights: Mapping[str, Tensor]):
        self.tree = tree
        self.weights = weights
        self.fake: Any = FakeTensorMode(shape_env=ShapeEnv())
        self.letters: dict[str, Any] = {}  # -> symbolic size
        self.examples: Iterator[int] = (n for n in range(_EXAMPLES, 1 << 16) if _prime(n))
        self.params = Weights()
        self.dims: dict[str, str] = {}

    def program(self, facts: Facts | None) -> Program:
        entries = {}
        for name, (section, regions) in self.tree.entries.items():
            entries[name] = _Graphs(self, regions).entry(section)
        if lost := [name for name in self.weights if name not in self.params]:
            raise TextError(unknown("weight", lost[0], self.params) + "; the text reads no other")
        if facts is None:
            facts = Facts("text", vocab_size=_vocabulary(entries), max_context=_CONTEXT)
        state = [self._state(line) for line in self.tree.state]
        return Program(self.params, entries, facts, state, self.dims)

    def _state(self, line: StateLine) -> State:
        kind = line.type
        if kind.sizes is None:
            raise kind.at.error("a state value is a tensor, such as f32[B,2,C,10]")
        for name in line.fields:
            if name not in (*STATE_FIELDS, HOME):
                raise line.at.error(unknown("what is said of state,", name, (*STATE_FIELDS, HOME)))
        if set(STATE_FIELDS) - line.fields.keys():
            wanted = ", ".join(f"{n}=…" for n in STATE_FIELDS)
            raise line.at.error(f"say of '{line.name}' all of state({wanted})")
        shape = tuple(int(s) if s.isdigit() else s for s in kind.sizes)
        dtype = str(self.dtype(kind)).removeprefix("torch.")
        try:
            return State.parse(name=line.name, dtype=dtype, shape=shape, **line.fields)
        except (TypeError, ValueError):
            told = ", ".join(f"{n}={value!r}" for n, value in line.fields.items())
            raise line.at.error(
                f"there is no state value '{line.name}' with {told}; names are as kv.0.k, kv.pos, kept.0.v"
            ) from None

    def dtype(self, kind: Type) -> torch.dtype:
        found = _DTYPES.get(kind.dtype) or getattr(torch, kind.dtype, None)
        if not isinstance(found, torch.dtype):
            raise kind.at.error(unknown("type", kind.dtype, _DTYPES))
        return found

    def empty(self, kind: Type) -> Tensor:
        """A fake value of a type, whose letters are made where they are new."""
        sizes = [self.size(s, kind.at) for s in kind.sizes or ()]
        with self.fake:
            return torch.empty(tuple(sizes), dtype=self.dtype(kind))

    def size(self, text: str, at: Place, new: bool = True) -> Any:
        """A number, a letter, or what is computed of them."""
        if text.isdigit():
            return int(text)
        if _LETTER.fullmatch(text):
            if text not in self.letters:
                if not new:
                    raise at.error(unknown("size", text, self.letters))
                self.letters[text] = symbolic_size(self.fake, next(self.examples))
                self.dims[str(self.letters[text])] = text
            return self.letters[text]
        try:
            return _computed(ast.parse(text, mode="eval").body, lambda t: self.size(t, at, new))
        except (SyntaxError, KeyError, TypeError, ValueError, ArithmeticError):
            raise at.error(
                f"size '{text}' is no number, letter or sum of them, as in 2*T+1"
            ) from None

    def weight(self, line: Weight) -> Tensor:
        """The fake value of a weight, which is made where no line before named it."""
        kind = line.type
        if kind.sizes is None or not all(s.isdigit() for s in kind.sizes):
            raise kind.at.error(f"weight '{line.name}' has sizes in numbers, as in f32[48,40]")
        shape, dtype = tuple(map(int, kind.sizes)), self.dtype(kind)
        if line.name not in self.params:
            made = self.weights.get(line.name)
            self.params[line.name] = made if made is not None else weight(line.name, shape, dtype)
        known = self.params.blank(line.name)
        if (tuple(known.shape), known.dtype) != (shape, dtype):
            raise kind.at.error(
                f"weight '{line.name}' is {type_text(known, {})} elsewhere, and {kind.text} here"
            )
        with self.fake:
            return torch.empty_strided(known.shape, known.stride(), dtype=dtype)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Within it operators run on fake values, and no answer about a size fixes it."""
        with (
            self.fake,
            enable_python_dispatcher(),
            torch.no_grad(),
            self.fake.shape_env.suppress_guards(),
        ):
            yield

    def checked(self, value: Any, kind: Type | None, what: str) -> Any:
        """A fake value as it is written, where both are the same. Of sizes that torch writes otherwise
        (Min(T,256), where it is known that T is less) what is written stays.
        """
        if kind is None:
            return value
        got = type_text(value, self.dims)
        if got == kind.text:
            return value
        if isinstance(value, Tensor) and kind.sizes is not None and len(kind.sizes) == value.dim():
            wanted = [self.size(s, kind.at, new=False) for s in kind.sizes]
            pairs = zip(value.shape, wanted, strict=True)
            if self.dtype(kind) is value.dtype and all(_number(a) == _number(b) for a, b in pairs):
                with self.fake:
                    return torch.empty(tuple(wanted), dtype=value.dtype)
        raise kind.at.error(f"{what} gives {got}, not {kind.text}; write the type that it gives")


class _Graphs:
    """The graphs of an entry."""

    def __init__(self, reader: _Reader, sections: dict[str, Section]):
        self.reader = reader
        self.sections = sections
        self.regions: dict[str, Region] = {}
        self.results: dict[str, tuple[Any, ...]] = {}
        self.open: list[str] = []  # regions that are being made

    def entry(self, section: Section) -> Entry:
        (body,) = section.bodies
        for given in body.inputs:
            if given.type.sizes is None:
                raise given.type.at.error(
                    f"input '{given.name}' of an entry is a tensor, such as i64[B,T]"
                )
        values = [self.reader.empty(i.type) for i in body.inputs]
        graph, _ = self.graph(body, values)
        made = {
            i.name: _default(i, v.dtype)
            for i, v in zip(body.inputs, values, strict=True)
            if i.default is not None
        }
        for name in self.sections:
            if name not in self.regions:
                at = self.sections[name].at
                raise at.error(f"{section.name} calls no region '{name}'; call it, or take it out")
        return Entry(graph, [r.output for r in body.results or []], made)

    def graph(self, body: Body, values: list[Any]) -> tuple[fx.Graph, tuple[Any, ...]]:
        """A graph of inputs of these values, and the values of what it returns."""
        graph, names = fx.Graph(), dict[str, fx.Node]()
        for given, value in zip(body.inputs, values, strict=True):
            node = graph.placeholder(given.name)
            node.meta["val"] = self.reader.checked(value, given.type, f"input '{given.name}'")
            names[given.name] = node
        for line in body.lines:
            if isinstance(line, Weight):
                if line.bound in names and names[line.bound].op == "placeholder":
                    raise line.at.error(
                        f"'{line.name}' is an input too; write %name: {line.type.text} = weight('{line.name}')"
                    )
                node = graph.create_node("get_attr", line.name)
                node.meta["val"] = self.reader.weight(line)
                names[line.bound] = node
            elif line.value in names:
                raise line.at.error(f"{line.value} is a value above; give this one another number")
            else:
                names[line.value] = self.call(graph, line, names)
        results = [_node(r.value, names) for r in body.results or []]
        graph.output(tuple(results))
        return graph, tuple(n.meta["val"] for n in results)

    def call(self, graph: fx.Graph, line: Call, names: dict[str, fx.Node]) -> fx.Node:
        args, kwargs = (_nodes(part, names) for part in (line.args, line.kwargs))
        fakes, named = (map_aggregate(part, _value) for part in (args, kwargs))
        target: Any
        if line.operator in self.sections:
            target = self.region(line, list(fakes), kwargs)
            value: Any = self.results[line.operator]
        else:
            target = _function(line, self.sections)
            try:
                with self.reader.running():
                    value = target(*fakes, **named)
            except Exception as error:  # of any operator
                raise line.at.error(_said(line, target, error)) from None
        node = graph.call_function(target, args, kwargs)
        node.meta["val"] = self.reader.checked(value, line.type, line.operator)
        return node

    def region(self, line: Call, values: list[Any], kwargs: Mapping[str, Any]) -> Region:
        """The region that a line calls, made of these values where it is not yet."""
        name, section = line.operator, self.sections[line.operator]
        count = len(section.bodies[0].inputs)
        if kwargs or len(values) != count:
            raise line.at.error(
                f"{name} takes {count} values, without names; {len(values)} stand here"
            )
        if name in self.open:
            raise line.at.error(f"{name} calls itself; a region may call others only")
        if name not in self.regions:
            self.open.append(name)
            graphs = []
            for body in section.bodies:
                if len(body.inputs) != count:
                    raise section.at.error(f"{name} and its 'otherwise' take equally many values")
                graph, results = self.graph(body, values)
                graphs.append(graph)
                self.results.setdefault(name, results)
            self.open.pop()
            self.regions[name] = (Region if len(graphs) == 1 else Conditional)(name, *graphs)
        return self.regions[name]


def _default(declared: Input, dtype: torch.dtype) -> Tensor:
    try:
        return torch.tensor(declared.default, dtype=dtype)
    except (TypeError, ValueError, RuntimeError):
        raise declared.at.error(
            f"the value of input '{declared.name}' is one number, or equal lists of them, as in [True, True]"
        ) from None


def weight(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A weight that no one gave: noise by its name, of rows that keep the size of what they multiply;
    zeros where it is no floating-point number, for they are in the range of any index.
    """
    if not dtype.is_floating_point:
        return torch.zeros(shape, dtype=dtype)
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))
    return (noise / math.sqrt(shape[-1]) if len(shape) > 1 else noise).to(dtype)


def _prime(number: int) -> bool:
    return all(number % n for n in range(2, math.isqrt(number) + 1))


def _number(size: Any) -> int:
    """A size at the examples."""
    return int(size.node.hint) if isinstance(size, torch.SymInt) else int(size)


def _computed(tree: ast.expr, size: Callable[[str], Any]) -> Any:
    """What is computed of sizes; KeyError where it is something else."""
    match tree:
        case ast.BinOp(_, ast.Div(), ast.Constant()):
            return size(ast.unparse(tree).replace(" ", ""))  # C/16
        case ast.BinOp(left, op, right):
            functions: dict[type, Any] = {
                ast.Add: operator.add,
                ast.Sub: operator.sub,
                ast.Mult: operator.mul,
                ast.FloorDiv: operator.floordiv,
                ast.Mod: operator.mod,
                ast.Pow: operator.pow,
            }
            return functions[type(op)](_computed(left, size), _computed(right, size))
        case ast.UnaryOp(ast.USub(), value):
            return -_computed(value, size)
        case ast.Call(ast.Name(name), args):
            function = {"Max": torch.sym_max, "Min": torch.sym_min, "Mod": operator.mod}[name]
            value, *others = (_computed(a, size) for a in args)
            for other in others:
                value = function(value, other)
            return value
        case ast.Constant(int() as number):
            return number
        case ast.Name(name):
            return size(name)
    raise KeyError(ast.unparse(tree))


def _value(item: Any) -> Any:
    return item.meta["val"] if isinstance(item, fx.Node) else item


def _nodes(value: Any, names: Mapping[str, fx.Node]) -> Any:
    """Arguments with the nodes that they name."""
    if isinstance(value, Ref):
        return _node(value, names)
    if isinstance(value, dict):
        return {k: _nodes(v, names) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_nodes(v, names) for v in value)
    return value


def _node(ref: Ref, names: Mapping[str, fx.Node]) -> fx.Node:
    if ref.name in names:
        return names[ref.name]
    if ref.name.startswith("%"):
        values = [n for n in names if n.startswith("%")]
        raise ref.at.error(unknown("value", ref.name, values) + "; a line above has to give it")
    others = [n for n in names if not n.startswith("%")]
    raise ref.at.error(
        unknown("input or weight", ref.name, others)
        + f"; a weight has a line above that says what it is, such as {ref.name}: f32[48]"
    )


def _function(line: Call, regions: Mapping[str, Section]) -> Any:
    """What a line calls: an operator of the dialect, one of aten, or a function of sizes."""
    first, *rest = line.operator.split(".")
    if line.operator == "getitem":
        return operator.getitem
    found: Any = None
    if rest and first in _MODULES:
        found = getattr(_MODULES[first], rest[-1], None) or getattr(
            _MODULES[first], f"_{rest[-1]}", None
        )
        if not callable(found) or function_name(found) != line.operator:
            found = None
    else:
        found = _overload("aten", first, ".".join(rest) or "default")
        if found is None and rest:
            found = _overload(first, rest[0], ".".join(rest[1:]) or "default")
    if found is None:
        raise line.at.error(_unknown_operator(line.operator, regions))
    return found


def _overload(library: str, name: str, overload: str) -> Any:
    packet = getattr(getattr(torch.ops, library), name, None)
    return getattr(packet, overload, None) if packet is not None else None


def _unknown_operator(name: str, regions: Mapping[str, Section]) -> str:
    first, *rest = name.split(".")
    packet = getattr(torch.ops.aten, first, None)
    if packet is not None:
        kinds = [f"{first}.{o}".removesuffix(".default") for o in packet.overloads()]
        told = f"operator '{name}' does not exist" if rest else f"'{name}' has several forms"
        return f"{told}; write one of {', '.join(kinds)}"
    names = [*regions, "getitem"]
    for schema in torch._C._jit_get_all_schemas():
        library, _, short = schema.name.partition("::")
        if library in ("aten", "accel"):
            kind = f".{schema.overload_name}" if schema.overload_name else ""
            names.append(("" if library == "aten" else "accel.") + short + kind)
    near = unknown("operator", name, names)
    if "did you mean" in near:
        return near
    dialect = sorted(n for n in names if n.startswith("accel."))
    return f"operator '{name}' does not exist; those of accel: {', '.join(dialect)}"


def _said(line: Call, target: Any, error: Exception) -> str:
    """Why an operator does not take its operands, and what it takes."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    text = f"{line.operator} does not take these operands: {lines[0]}"
    schema = getattr(target, "_schema", None)
    return f"{text}; it is {schema}" if schema is not None else text


def _vocabulary(entries: Mapping[str, Entry]) -> int:
    logits = entries["step"].output_nodes().get("logits") if "step" in entries else None
    width = logits.meta["val"].shape[-1] if logits is not None else 1
    return width if isinstance(width, int) else 1
