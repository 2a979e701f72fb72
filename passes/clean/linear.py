"""Every product with a weight becomes aten.linear, so that later passes look for one form."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from accel.ir.program import Editor, Program
from accel.passes import Pass, Report
from accel.passes.clean.clean import Clean, replace

aten = torch.ops.aten


@dataclass(frozen=True)
class Linears(Pass):
    """mm / matmul / addmm with a parameter [I,O]  ->  linear with its transposed view [O,I].

    Flattening the tokens before the product and restoring them after it goes too.
    """

    after = (Clean,)

    def run(self, program: Program) -> Report:
        report = Report()
        graph = program.step.graph
        editor = Editor(program, graph)
        for node in list(graph.nodes):
            parts = _parts(node)
            if parts is None:
                continue
            x, weight, bias = parts
            last = node
            x, last = _unflatten(x, node)
            with graph.inserting_before(last):
                stored = editor.derived(f"{weight.target}.T", str(weight.target), torch.t)
                new = editor.call(aten.linear.default, x, stored, bias, like=node)
            replace(last, new)
            report.changed += 1
        Clean().run(program)
        return report


def _parts(node: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node | None] | None:
    """(x, weight, bias) of a product with a stored matrix."""
    if node.target is aten.addmm.default and not node.kwargs:
        bias, x, weight = node.args
    elif node.target in (aten.mm.default, aten.matmul.default):
        bias, (x, weight) = None, node.args
    else:
        return None
    if not isinstance(weight, fx.Node) or weight.op != "get_attr" or weight.meta["val"].dim() != 2:
        return None
    if not isinstance(x, fx.Node) or x.meta["val"].dim() < 2:
        return None
    if bias is not None and (not isinstance(bias, fx.Node) or bias.meta["val"].dim() != 1):
        return None
    return x, weight, bias


def _unflatten(x: fx.Node, node: fx.Node) -> tuple[fx.Node, fx.Node]:
    """The operand before reshape([-1, I]) and the result after reshape([..., O]), where both are there."""
    if x.target is not aten.reshape.default or len(node.users) != 1:
        return x, node
    after = next(iter(node.users))
    before = x.args[0]
    if after.target is not aten.reshape.default or not isinstance(before, fx.Node):
        return x, node
    wide, out = before.meta["val"].shape, after.meta["val"].shape
    if [str(d) for d in wide[:-1]] == [str(d) for d in out[:-1]] and str(wide[-1]) == str(
        x.meta["val"].shape[-1]
    ):
        return before, after
    return x, node
