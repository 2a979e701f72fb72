"""Experts: weights gathered per row and multiplied become one operator, which need not gather them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from accel.ir.ops.experts import expert_linear
from accel.ir.ops.op import operand_of
from accel.ir.region import sizes
from accel.passes.clean.clean import Clean
from accel.passes.clean.fold import Fold
from accel.passes.recognise.region import Kinds, packet
from accel.passes.recognise.rewrite import Rewrite, Rule, Site, Value, call

aten = torch.ops.aten
_NEAR = 8  # operators between a router's scores and the choice of the best


def _product(at: Site, a: fx.Node, b: fx.Node) -> fx.Node | None:
    right = _chosen(b, at.kinds)
    chosen, x = (right, a) if right else (_chosen(a, at.kinds), b)
    axis = 1 if right else 2
    if chosen is None or sizes(x)[axis] != "1":
        return None
    rows = at.call(aten.squeeze.dim, x, axis)
    out = at.call(expert_linear.default, rows, chosen[1], chosen[0], right is not None)
    return at.call(aten.unsqueeze.default, out, axis)


@dataclass(frozen=True)
class Experts(Rewrite):
    """bmm(weight[ids], x[:, :, None]), or bmm(x[:, None], weight[ids])  ->  expert_linear(x, ids, weight).

    A gather of the chosen weights costs a copy of them per row, which a prefill cannot afford.
    """

    after = (Clean, Fold)
    rules = (Rule(call(aten.bmm.default, Value("a"), Value("b")), _product),)


def routes(node: fx.Node) -> bool:
    """Whether the result of a product goes into a choice of the largest."""
    edge = [node]
    for _ in range(_NEAR):
        edge = [u for n in edge for u in n.users if u.op == "call_function"]
        if any(n.target is aten.topk.default for n in edge):
            return True
        edge = [n for n in edge if n.target is not aten.linear.default]
    return False


def _chosen(node: fx.Node, kinds: Kinds) -> tuple[fx.Node, fx.Node] | None:
    """(weight [X,..,..], ids [N]) of weight[ids]."""
    if packet(node) is aten.index:
        weight, indices = node.args[:2]
        ids = indices[0] if isinstance(indices, (list, tuple)) and len(indices) == 1 else None
    elif packet(node) is aten.index_select and node.args[1] == 0:
        weight, ids = node.args[0], operand_of(node, "index")
    else:
        return None
    if not isinstance(weight, fx.Node) or not isinstance(ids, fx.Node):
        return None
    if kinds[weight] != "const" or len(sizes(weight)) != 3 or len(sizes(ids)) != 1:
        return None
    return weight, ids
