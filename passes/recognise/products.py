"""Products of two values of the tokens, spelled as one operator: matmul."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from accel.ir.program import Editor, Program
from accel.ir.region import sizes
from accel.passes.clean.clean import replace
from accel.passes.recognise.region import Kinds, packet

aten = torch.ops.aten
PRODUCTS = (aten.matmul, aten.bmm)


def spell_out(program: Program) -> None:
    """einsum(a, b) -> permuted matmul; baddbmm(x, a, b) -> β x + α (a b). Weights stay as they are."""
    graph = program.step.graph
    kinds = Kinds(graph)
    for node in list(graph.nodes):
        if node.target is aten.baddbmm.default:
            _spell_sum(program, node)
        elif node.target is aten.einsum.default:
            operands: Any = node.args[1]
            if len(operands) == 2 and all(kinds[n] == "data" for n in operands):
                _spell_einsum(program, node)


def is_product(node: fx.Node, kinds: Kinds) -> bool:
    """Whether both factors depend on the tokens."""
    return packet(node) in PRODUCTS and all(kinds.get(n) == "data" for n in node.all_input_nodes)


def _spell_sum(program: Program, node: fx.Node) -> None:
    added, a, b = node.args
    editor = Editor(program, node.graph)
    with node.graph.inserting_before(node):
        product = editor.call(aten.bmm.default, a, b, like=node)
        scaled = editor.call(aten.mul.Tensor, product, node.kwargs.get("alpha", 1), like=node)
        new = scaled
        if beta := node.kwargs.get("beta", 1):  # with 0 it may hold no numbers, as of torch.empty
            offset = editor.call(aten.mul.Tensor, added, beta)
            new = editor.call(aten.add.Tensor, scaled, offset, like=node)
    replace(node, new)


def _spell_einsum(program: Program, node: fx.Node) -> None:
    """Labels of both factors and the result go in front; a row label, the summed one and a column
    label stay behind. A factor without one of those in front gets an axis of 1.
    """
    given: Any = node.args
    equation, (a, b) = given
    left, out = equation.replace(" ", "").split("->") if "->" in equation else (equation, "")
    x, y = left.split(",")
    summed = [c for c in x if c in y and c not in out]
    columns = [c for c in out if c not in x]
    rows = [c for c in out if c not in y]
    plain = all(len(set(s)) == len(s) for s in (x, y, out)) and "." not in equation
    if not plain or not out or set(x + y) - set(out) - set(summed):
        return
    if len(summed) != 1 or len(columns) != 1 or not rows:
        return
    moving = [c for c in rows if not sizes(a)[x.index(c)].isdigit()] or rows
    row = moving[-1]
    front = [c for c in x if c in out and c != row]
    editor = Editor(program, node.graph)
    with node.graph.inserting_before(node):
        first = editor.call(aten.permute.default, a, [x.index(c) for c in (*front, row, *summed)])
        kept = [c for c in front if c in y]
        second = editor.call(
            aten.permute.default, b, [y.index(c) for c in (*kept, *summed, *columns)]
        )
        for i, c in enumerate(front):
            if c not in y:
                second = editor.call(aten.unsqueeze.default, second, i)
        product = editor.call(aten.matmul.default, first, second, like=node)
        order = [*front, row, *columns]
        new = editor.call(aten.permute.default, product, [order.index(c) for c in out], like=node)
    replace(node, new)
