"""The residual stream's addition and the norm that reads its sum become one operator."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from accel.ir.ops.norm import add_layer_norm, add_rms_norm, rms_norm
from accel.ir.region import sizes
from accel.passes.clean.clean import replace
from accel.passes.recognise.norm import Norms
from accel.passes.recognise.rewrite import Rewrite, Rule, Site, Value, call
from accel.passes.state.layers import Layers

aten = torch.ops.aten
SUM = call(aten.add.Tensor, Value("x"), Value("y"), name="total", shared=True)


def _add_norm(at: Site, x: fx.Node, y: fx.Node, total: fx.Node) -> fx.Node | str:
    if len(sizes(total)) != 3 or not sizes(x) == sizes(y) == sizes(total):
        return "adds no two values [B,T,E]"
    if len({n.meta["val"].dtype for n in (x, y, total)}) > 1:
        return "adds values of two types"
    op, options = add_rms_norm.default, at.node.args[1:]
    if at.node.target is aten.layer_norm.default:
        given: list[Any] = list(at.node.args[1:])
        given += [None, None, 1e-5][len(given) - 1 :]
        shape, weight, bias, eps = given[:4]
        if weight is None or len(shape) != 1:
            return "has no weight"
        op, options = add_layer_norm.default, (weight, bias, eps)
    if any(isinstance(o, fx.Node) and o.op != "get_attr" for o in options):
        return "its weight is computed"
    editor = at.editor
    with total.graph.inserting_before(total):  # what reads the sum may stand before the norm
        weights = [editor.param(str(o.target)) if isinstance(o, fx.Node) else o for o in options]
        both = at.call(op, x, y, *weights)
        normed = at.call(operator.getitem, both, 0)
        same = editor.call(operator.getitem, both, 1, like=total)
    replace(total, same)
    return normed


@dataclass(frozen=True)
class Residual(Rewrite):
    """s = x + y; norm(s) … s  ->  (n, s) = add_norm(x, y), for RMSNorm and LayerNorm [B,T,E].

    Within a layer: its last sum stays the one value that goes from layer to layer.

    Before and after: `tests/passes/texts/residual.before.txt`, `residual.after.txt`.
    """

    after = (Norms, Layers)
    rules = (Rule(call((rms_norm.default, aten.layer_norm.default), SUM, ...), _add_norm),)
