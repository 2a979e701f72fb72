"""A program as stable text: one line a node, shapes in letters, repeated regions once.

`accel.ir.parser.read` reads it back; docs/concepts/program-and-state.md has the grammar.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from accel.ir.region import Conditional, Entry, Region, graphs_of
from accel.ir.state import Home, StateValue

SHORT = {
    torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16", torch.float64: "f64",
    torch.int64: "i64", torch.int32: "i32", torch.bool: "bool", torch.uint8: "u8", torch.int8: "i8",
}  # fmt: skip
NAME = re.compile(r"(?:[A-Za-z0-9_]|\{[^{}\s]*\})(?:[\w.]|\{[^{}\s]*\})*")
NUMBER = re.compile(r"-?(?:\d+(?:\.\d*)?(?:e[+-]?\d+)?|inf|nan)")
WORDS = ("None", "True", "False", "return", "torch", "device", "weight", "state", "otherwise", "as")
COMMON = ("rope", "bias")  # tables that layers share, whose number is no layer's

Spell = Callable[[str], str]


def program_text(
    entries: Mapping[str, Entry], dims: Mapping[str, str], state: Sequence[StateValue]
) -> str:
    """The state, then every entry, each followed by the regions that it calls."""
    parts = [_state_text(state)] if state else []
    known: dict[str, tuple[str, str, list[str]]] = {}  # form -> entry, region and names it uses
    for name, entry in entries.items():
        parts.append(f"{name}({_entry_inputs(entry, dims)}):\n{_body(entry.graph, dims, entry)}")
        for region in _regions(entry.graph):
            parts.append(_region_text(name, region, dims, known))
    return "\n\n".join(parts) + "\n"


STATE_FIELDS = ("role", "layer", "fill")  # of a state value, beside its name, type and shape
HOME = "home"  # told where it is not memory


def _state_text(state: Sequence[StateValue]) -> str:
    lines = ["state:"]
    for value in state:
        shape = ",".join(map(str, value.shape))
        told = ", ".join(f"{name}={plain(getattr(value, name))}" for name in STATE_FIELDS)
        if value.home is not Home.MEMORY:
            told += f", {HOME}={plain(value.home.value)}"
        kind = f"{SHORT[getattr(torch, value.dtype)]}[{shape}]"
        lines.append(f"  {value.name}: {kind} = state({told})")
    return "\n".join(lines)


def _regions(graph: fx.Graph) -> list[Region]:
    """The regions that a graph calls, and that those call, in order, each once."""
    found: dict[Region, None] = {}
    todo = [graph]
    while todo:
        for node in todo.pop(0).nodes:
            if isinstance(node.target, Region) and node.target not in found:
                found[node.target] = None
                todo += graphs_of(node.target)
    return list(found)


def _region_text(
    entry: str,
    region: Region,
    dims: Mapping[str, str],
    known: dict[str, tuple[str, str, list[str]]],
) -> str:
    """A region written out, or what it is like and which of its names differ from that one's."""
    names: dict[str, str] = {}
    form = _graphs_text(region, dims, lambda name: names.setdefault(name, f"<{len(names)}>"))
    whole = region.name + _graphs_text(region, dims)
    if "= weight(" in whole:  # names that are no names
        return whole
    if form not in known:
        known[form] = entry, region.name, list(names)
        return whole
    owner, other, before = known[form]
    like = other if owner == entry else f"{other} of {owner}"
    pairs = zip(before, names, strict=True)
    apart = [f"{a} = {b}" for a, b in pairs if in_layer(a, other, region.name) != b]
    return f"{region.name}: as {like}{' with ' if apart else ''}{', '.join(apart)}"


def in_layer(name: str, before: str, after: str) -> str:
    """A name in the region `before` (layer.0) as the region `after` (layer.7) has it: with its number."""
    old, new = before.rpartition(".")[2], after.rpartition(".")[2]
    parts = name.split(".")
    if not (old.isdigit() and new.isdigit()) or old not in parts or parts[0] in COMMON:
        return name
    parts[parts.index(old)] = new
    return ".".join(parts)


def _graphs_text(region: Region, dims: Mapping[str, str], spell: Spell = str) -> str:
    """A region without its name."""
    graph = region.graph
    text = f"({_inputs(graph, dims, spell)}):\n{_body(graph, dims, spell=spell)}"
    if isinstance(region, Conditional):
        graph = region.otherwise
        text += f"\n otherwise({_inputs(graph, dims, spell)}):\n{_body(graph, dims, spell=spell)}"
    return text


def _entry_inputs(entry: Entry, dims: Mapping[str, str]) -> str:
    shown = []
    for holder in entry.graph.find_nodes(op="placeholder"):
        value = entry.defaults.get(str(holder.target))
        default = f" = {plain(value.tolist())}" if value is not None else ""
        shown.append(f"{holder.target}: {type_text(holder.meta.get('val'), dims)}{default}")
    return ", ".join(shown)


def _inputs(graph: fx.Graph, dims: Mapping[str, str], spell: Spell) -> str:
    holders = graph.find_nodes(op="placeholder")
    return ", ".join(
        f"{spell(str(h.target))}: {type_text(h.meta.get('val'), dims)}" for h in holders
    )


def _body(
    graph: fx.Graph, dims: Mapping[str, str], entry: Entry | None = None, spell: Spell = str
) -> str:
    names: dict[fx.Node, str] = {}
    inputs = {str(n.target) for n in graph.find_nodes(op="placeholder")}
    lines: list[str] = []
    count = 0
    for node in graph.nodes:
        kind = type_text(node.meta.get("val"), dims)
        if node.op == "placeholder":
            names[node] = spell(str(node.target))
        elif node.op == "get_attr" and is_name(str(node.target)) and node.target not in inputs:
            names[node] = spell(str(node.target))
            lines.append(f"  {names[node]}: {kind}")
        elif node.op == "output":
            given = node.args[0]
            assert isinstance(given, (tuple, list))
            values = [names[n] for n in given]
            if entry is not None:
                values = [f"{o}={v}" for o, v in zip(entry.outputs, values, strict=True)]
            lines.append(f"  return {', '.join(values)}")
        else:
            names[node] = f"%{count}"
            count += 1
            if node.op == "get_attr":
                call = f"weight({plain(str(node.target))})"
            else:
                call = f"{_operator(node, spell)}({_arguments(node, names)})"
            lines.append(f"  {names[node]}: {kind} = {call}")
    return "\n".join(lines)


def is_name(text: str) -> bool:
    """Whether a name can stand in a text as it is."""
    return bool(NAME.fullmatch(text)) and not NUMBER.fullmatch(text) and text not in WORDS


def _operator(node: fx.Node, spell: Spell) -> str:
    if isinstance(node.target, Region):
        return spell(node.target.name)
    if isinstance(node.target, torch._ops.OpOverload):
        return str(node.target).removeprefix("aten.").removesuffix(".default")
    return function_name(node.target)


def function_name(function: Any) -> str:
    """How a Python function is written: `getitem`, and others with the module that they are of."""
    name = getattr(function, "__name__", str(function))
    if function is operator.getitem:
        return str(name)
    module = str(getattr(function, "__module__", None) or "builtins")
    return f"{module.lstrip('_')}.{name}"


def _arguments(node: fx.Node, names: Mapping[fx.Node, str]) -> str:
    class Name(str):
        def __repr__(self) -> str:
            return str(self)

    args: Any = map_arg(node.args, lambda n: Name(names[n]))
    kwargs: Any = map_arg(node.kwargs, lambda n: Name(names[n]))
    return ", ".join([*(plain(a) for a in args), *(f"{k}={plain(v)}" for k, v in kwargs.items())])


def plain(value: Any) -> str:
    """A value that is no node, so that it reads back as the same."""
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(plain(v) for v in value) + "]"
    return repr(value)


def type_text(value: Any, dims: Mapping[str, str]) -> str:
    """`f32[B,T,48]`; symbols are written as their letters."""
    if isinstance(value, Tensor):
        sizes = ",".join(size_text(d, dims) for d in value.shape)
        return f"{SHORT.get(value.dtype) or str(value.dtype).removeprefix('torch.')}[{sizes}]"
    if isinstance(value, (tuple, list)):
        return "(" + ", ".join(type_text(v, dims) for v in value) + ")"
    return "int" if isinstance(value, (int, torch.SymInt)) else type(value).__name__


def size_text(size: Any, dims: Mapping[str, str]) -> str:
    """A size, or a question about sizes, in letters and in their order, whatever torch calls them."""
    if isinstance(size, int):
        return str(size)
    expr = size.node.expr if isinstance(size, torch.SymInt) else size
    if isinstance(expr, sympy.Basic):
        letters = {
            s: sympy.Symbol(dims.get(str(s), str(s)), **s.assumptions0) for s in expr.free_symbols
        }
        expr = expr.xreplace(letters)
    return str(expr).replace(" ", "")
