"""Calls that read weights coarsely: of a product in two halves (`quantspec_weights.py`) the upper one alone."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from accel.ir.kv import COARSE
from accel.ir.ops.op import operand_of
from accel.ir.ops.quantized import quantized_linear
from accel.ir.program import Editor, Program
from accel.ir.region import Conditional, Region, layer_calls
from accel.passes.clean.clean import replace

UPPER, LOWER = ".upper", ".lower"  # how the names of the halves of a weight end
SCALES = ".scales"  # and of what is beside their codes
add = torch.ops.aten.add.Tensor


def read_coarsely(program: Program, coarse: fx.Node) -> None:
    """quantized_linear(x, upper) + quantized_linear(x, lower)  ->  the first alone where the step's bool `coarse` []
    holds, in its layers too.
    """
    graph = coarse.graph
    _choose(program, graph, coarse)
    for call in layer_calls(graph):
        assert isinstance(call.target, Region)
        inner = call.target.graph
        if not any(_halves(node) for node in inner.nodes):
            continue
        last = list(inner.find_nodes(op="placeholder"))[-1]
        with inner.inserting_after(last):
            holder = inner.placeholder(COARSE)
        holder.meta["val"] = coarse.meta["val"]
        call.args = (*call.args, coarse)
        _choose(program, inner, holder)


def _choose(program: Program, graph: fx.Graph, coarse: fx.Node) -> None:
    for node in list(graph.nodes):
        if not (halves := _halves(node)):
            continue
        upper = halves[0]
        x, bias = operand_of(upper, "x"), operand_of(upper, "bias")
        stem = str(operand_of(upper, "q").target).removesuffix(UPPER)
        operands = [coarse, x, *([] if bias is None else [bias])]
        graphs = [_graph(program, operands, halves[:count]) for count in (1, 2)]
        editor = Editor(program, graph)
        with graph.inserting_before(node):
            region = Conditional(f"read.{stem}.{node.name}", *graphs)
            call = graph.call_function(region, tuple(operands))
            call.meta |= {**node.meta, "val": (node.meta["val"],)}
            found = editor.call(operator.getitem, call, 0, like=node)
        replace(node, found)
        for half in halves:
            parts = [one for one in half.all_input_nodes if one.op == "get_attr"]
            graph.erase_node(half)
            for part in parts:
                if not part.users:
                    graph.erase_node(part)


def is_lower(name: str) -> bool:
    """Whether a parameter is of lower halves: their codes, or scales."""
    return name.removesuffix(SCALES).endswith(LOWER)


def _halves(node: fx.Node) -> list[fx.Node]:
    """The upper product and the lower one, where a node is their sum."""
    if node.target is not add:
        return []
    found = [one for one in node.args if isinstance(one, fx.Node)]
    return found if len(found) == 2 and _is_lower(found[1]) else []


def _is_lower(node: fx.Node) -> bool:
    codes = operand_of(node, "q") if node.target is quantized_linear.default else None
    return isinstance(codes, fx.Node) and str(codes.target).endswith(LOWER)


def _graph(program: Program, operands: Sequence[fx.Node], halves: Sequence[fx.Node]) -> fx.Graph:
    """The sum of these halves of a product; operands: the choice, the input, and maybe a bias."""
    graph = fx.Graph()
    holders = [graph.placeholder(f"{one.name}.in") for one in operands]
    for holder, one in zip(holders, operands, strict=True):
        holder.meta["val"] = one.meta["val"]
    editor, place = Editor(program, graph), dict(zip(operands, holders, strict=True))
    products = []
    for half in halves:
        args: list[Any] = list(half.args)
        for n, one in enumerate(args):
            if isinstance(one, fx.Node):
                args[n] = place[one] if one in place else editor.param(str(one.target))
        products.append(editor.call(quantized_linear.default, *args, like=half))
    found = products[0]
    for product in products[1:]:
        found = editor.call(add, found, product, like=found)
    graph.output((found,))
    return graph
