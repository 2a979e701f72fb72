"""A program as stable text: one line a node, shapes in letters, repeated layers once."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from accel.ir.region import Conditional, Entry, Region

_SHORT = {
    torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16", torch.float64: "f64",
    torch.int64: "i64", torch.int32: "i32", torch.bool: "bool", torch.uint8: "u8", torch.int8: "i8",
}  # fmt: skip


def program_text(entries: Mapping[str, Entry], dims: Mapping[str, str]) -> str:
    """Every entry, then each different layer once."""
    parts: list[str] = []
    bodies: dict[str, str] = {}
    for name, entry in entries.items():
        parts.append(_entry_text(name, entry, dims))
        for node in entry.graph.nodes:
            if isinstance(node.target, Region):
                body = _body(node.target.graph, dims)
                if isinstance(node.target, Conditional):
                    body += f"\n otherwise:\n{_body(node.target.otherwise, dims)}"
                shape = _anonymous(body)
                if shape in bodies:
                    parts.append(f"{node.target.name}: as {bodies[shape]}")
                else:
                    bodies[shape] = node.target.name
                    parts.append(f"{node.target.name}({_inputs(node.target.graph, dims)}):\n{body}")
    return "\n\n".join(parts) + "\n"


def _entry_text(name: str, entry: Entry, dims: Mapping[str, str]) -> str:
    return f"{name}({_inputs(entry.graph, dims)}):\n{_body(entry.graph, dims, entry.outputs)}"


def _inputs(graph: fx.Graph, dims: Mapping[str, str]) -> str:
    holders = graph.find_nodes(op="placeholder")
    return ", ".join(f"{h.target}: {type_text(h.meta.get('val'), dims)}" for h in holders)


def _body(graph: fx.Graph, dims: Mapping[str, str], outputs: list[str] | None = None) -> str:
    names: dict[fx.Node, str] = {}
    lines: list[str] = []
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            names[node] = str(node.target)
        elif node.op == "output":
            values = [names[n] for n in node.all_input_nodes]
            given = node.args[0]
            assert isinstance(given, (tuple, list))
            values = [names[n] for n in given]
            shown = (
                values
                if outputs is None
                else [f"{o}={v}" for o, v in zip(outputs, values, strict=True)]
            )
            lines.append(f"  return {', '.join(shown)}")
        else:
            names[node] = f"%{len(lines)}"
            kind = type_text(node.meta.get("val"), dims)
            lines.append(
                f"  {names[node]}: {kind} = {_operator(node)}({_arguments(node, names, dims)})"
            )
    return "\n".join(lines)


def _operator(node: fx.Node) -> str:
    if isinstance(node.target, Region):
        return node.target.name
    text = str(node.target)
    return (
        text.removeprefix("aten.").removesuffix(".default")
        if "." in text
        else getattr(node.target, "__name__", text)
    )


def _arguments(node: fx.Node, names: Mapping[fx.Node, str], dims: Mapping[str, str]) -> str:
    class Name(str):
        def __repr__(self) -> str:
            return str(self)

    args: Any = map_arg(node.args, lambda n: Name(names[n]))
    kwargs: Any = map_arg(node.kwargs, lambda n: Name(names[n]))
    return ", ".join([*(_plain(a) for a in args), *(f"{k}={_plain(v)}" for k, v in kwargs.items())])


def _plain(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_plain(v) for v in value) + "]"
    return f"{value:.6g}" if isinstance(value, float) else repr(value)


def type_text(value: Any, dims: Mapping[str, str]) -> str:
    """`f32[B,T,48]`; symbols are written as their letters."""
    if isinstance(value, Tensor):
        return f"{_SHORT.get(value.dtype, value.dtype)}[{','.join(size_text(d, dims) for d in value.shape)}]"
    if isinstance(value, (tuple, list)):
        return "(" + ", ".join(type_text(v, dims) for v in value) + ")"
    return "int" if isinstance(value, (int, torch.SymInt)) else type(value).__name__


def size_text(size: Any, dims: Mapping[str, str]) -> str:
    return re.sub(r"[su]\d+", lambda m: dims.get(m.group(0), m.group(0)), str(size)).replace(
        " ", ""
    )


def _anonymous(body: str) -> str:
    """A body with layer numbers taken out, so that equal layers compare equal.

    Numbers of tables that layers share (rope.0, bias.1) and of arguments stay.
    """
    names = re.sub(r"(?<=[A-Za-z])_\d+\b", "", body)
    return re.sub(r"(?<=[A-Za-z_])(?<!\brope)(?<!\bbias)\.\d+\b", ".#", names)
