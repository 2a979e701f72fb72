"""Calls that read weights coarsely: of a product in two halves (`quantspec_weights.py`) the upper one alone."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import fx

from accel.ir.ops.op import operand_of
from accel.ir.ops.quantized import quantized_linear
from accel.ir.program import Editor, Program
from accel.ir.region import Conditional
from accel.passes.clean.clean import replace
from accel.passes.weights.quantspec_weights import LOWER

add = torch.ops.aten.add.Tensor


def read_coarsely(program: Program, coarse: fx.Node) -> None:
    """quantized_linear(x, upper) + quantized_linear(x, lower)  ->  the first alone where the bool `coarse` [] holds."""
    graph = coarse.graph
    for node in list(graph.find_nodes(op="call_function", target=add)):
        halves = [one for one in node.args if isinstance(one, fx.Node)]
        if len(halves) < 2 or not _is_lower(halves[1]):
            continue
        upper, lower = halves
        x, bias = operand_of(upper, "x"), operand_of(upper, "bias")
        operands = [coarse, x, *([] if bias is None else [bias])]
        graphs = [_graph(program, operands, halves[:count]) for count in (1, 2)]
        editor = Editor(program, graph)
        with graph.inserting_before(node):
            name = f"read.{lower.args[1].target.removesuffix(LOWER)}.{node.name}"
            call = graph.call_function(Conditional(name, *graphs), tuple(operands))
            call.meta |= {**node.meta, "val": (node.meta["val"],)}
            found = editor.call(operator.getitem, call, 0, like=node)
        replace(node, found)
        for half in (lower, upper):
            parts = [one for one in half.all_input_nodes if one.op == "get_attr"]
            graph.erase_node(half)
            for part in parts:
                if not part.users:
                    graph.erase_node(part)


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
        args = [
            one
            if not isinstance(one, fx.Node)
            else place[one]
            if one in place
            else editor.param(str(one.target))
            for one in half.args
        ]
        products.append(editor.call(half.target, *args, like=half))
    found = products[0]
    for product in products[1:]:
        found = editor.call(add, found, product, like=found)
    graph.output((found,))
    return graph
