"""The residual stream's addition and the norm that reads its sum become one operator."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from accel.ir.ops.norm import add_layer_norm, add_rms_norm, rms_norm
from accel.ir.program import Editor, Program
from accel.ir.region import sizes
from accel.passes import Pass, Report
from accel.passes.recognise.norm import Norms
from accel.passes.state.layers import Layers

aten = torch.ops.aten


@dataclass(frozen=True)
class Residual(Pass):
    """s = x + y; norm(s) … s  ->  (n, s) = add_norm(x, y), for RMSNorm and LayerNorm [B,T,E].

    Within a layer: its last sum stays the one value that goes from layer to layer.
    """

    after = (Norms, Layers)

    def run(self, program: Program) -> Report:
        report = Report()
        for graph in program.graphs():
            for node in list(graph.nodes):
                if node.target not in (rms_norm.default, aten.layer_norm.default):
                    continue
                if node.args[0].target is not aten.add.Tensor:
                    continue
                why = _fuse(program, node)
                if why:
                    report.refused.append(f"{node.name}: {why}")
                else:
                    report.changed += 1
        return report


def _fuse(program: Program, norm: fx.Node) -> str:
    """Rewrite one norm and the sum that it reads; the reason where that cannot be."""
    total = norm.args[0]
    assert isinstance(total, fx.Node)
    x, y = total.args[:2]
    if not isinstance(x, fx.Node) or not isinstance(y, fx.Node) or total.kwargs or norm.kwargs:
        return "adds no two values"
    if len(sizes(total)) != 3 or not sizes(x) == sizes(y) == sizes(total):
        return "adds no two values [B,T,E]"
    if len({n.meta["val"].dtype for n in (x, y, total)}) > 1:
        return "adds values of two types"
    if norm.target is rms_norm.default:
        op, options = add_rms_norm.default, tuple(norm.args[1:])
    else:
        given: list[Any] = list(norm.args[1:])
        given += [None, None, 1e-5][len(given) - 1 :]
        shape, weight, bias, eps = given[:4]
        if weight is None or len(shape) != 1:
            return "has no weight"
        op, options = add_layer_norm.default, (weight, bias, eps)
    if any(isinstance(o, fx.Node) and o.op != "get_attr" for o in options):
        return "its weight is computed"
    graph = norm.graph
    with graph.inserting_before(total):
        editor = Editor(program, graph)
        weights = [editor.param(str(o.target)) if isinstance(o, fx.Node) else o for o in options]
        both = editor.call(op, x, y, *weights, like=norm)
        normed = editor.call(operator.getitem, both, 0, like=norm)
        same = editor.call(operator.getitem, both, 1, like=total)
    norm.replace_all_uses_with(normed)
    graph.erase_node(norm)
    total.replace_all_uses_with(same)
    graph.erase_node(total)
    for option in options:
        if isinstance(option, fx.Node) and not option.users:
            graph.erase_node(option)
    return ""
