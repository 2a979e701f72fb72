"""Products of two values of the tokens, spelled as one operator: matmul."""

from __future__ import annotations

import torch
from torch import fx

from accel.ir.program import Program
from accel.ir.region import sizes
from accel.passes import Report
from accel.passes.recognise.region import Kinds, packet
from accel.passes.recognise.rewrite import Rule, Setting, Site, Value, call, rewrite

aten = torch.ops.aten
PRODUCTS = (aten.matmul, aten.bmm)


def spell_out(program: Program) -> None:
    """einsum(a, b) -> permuted matmul; baddbmm(x, a, b) -> β x + α (a b). Weights stay as they are."""
    rewrite(program, program.step.graph, RULES, Report())


def is_product(node: fx.Node, kinds: Kinds) -> bool:
    """Whether both factors depend on the tokens."""
    return packet(node) in PRODUCTS and all(kinds.get(n) == "data" for n in node.all_input_nodes)


def _sum(at: Site, x: fx.Node, a: fx.Node, b: fx.Node) -> fx.Node:
    given = at.node.kwargs
    product = at.call(aten.mul.Tensor, at.call(aten.bmm.default, a, b), given.get("alpha", 1))
    beta = given.get("beta", 1)
    if not beta:  # x may hold no numbers, as of torch.empty
        return product
    offset = at.editor.call(aten.mul.Tensor, x, beta)
    return at.call(aten.add.Tensor, product, offset)


def _einsum(at: Site, equation: str, a: fx.Node, b: fx.Node) -> fx.Node | None:
    """Labels of both factors and the result go in front; a row label, the summed one and a column
    label stay behind. A factor without one of those in front gets an axis of 1.
    """
    left, out = equation.replace(" ", "").split("->") if "->" in equation else (equation, "")
    x, y = left.split(",")
    summed = [c for c in x if c in y and c not in out]
    columns = [c for c in out if c not in x]
    rows = [c for c in out if c not in y]
    plain = all(len(set(s)) == len(s) for s in (x, y, out)) and "." not in equation
    if not plain or not out or set(x + y) - set(out) - set(summed):
        return None
    if len(summed) != 1 or len(columns) != 1 or not rows:
        return None
    if any(at.kinds[n] != "data" for n in (a, b)):
        return None
    moving = [c for c in rows if not sizes(a)[x.index(c)].isdigit()] or rows
    row = moving[-1]
    front = [c for c in x if c in out and c != row]
    call = at.editor.call
    first = call(aten.permute.default, a, [x.index(c) for c in (*front, row, *summed)])
    kept = [c for c in front if c in y]
    second = call(aten.permute.default, b, [y.index(c) for c in (*kept, *summed, *columns)])
    for i, c in enumerate(front):
        if c not in y:
            second = call(aten.unsqueeze.default, second, i)
    product = at.call(aten.matmul.default, first, second)
    order = [*front, row, *columns]
    return at.call(aten.permute.default, product, [order.index(c) for c in out])


RULES = (
    Rule(call(aten.baddbmm.default, Value("x"), Value("a"), Value("b"), ...), _sum),
    Rule(call(aten.einsum.default, Setting("equation"), [Value("a"), Value("b")], ...), _einsum),
)
