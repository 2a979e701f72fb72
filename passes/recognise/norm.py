"""RMSNorm, in the forms that models write it, becomes one operator."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from accel.ir.ops.norm import rms_norm
from accel.ir.program import Editor, Program
from accel.passes import Pass, Report
from accel.passes.clean.clean import Clean, replace
from accel.passes.recognise.region import Kinds

aten = torch.ops.aten


@dataclass(frozen=True)
class Norms(Pass):
    """x * rsqrt(mean(x²) + eps) * w  ->  rms_norm(x, w, eps). LayerNorm is one operator already."""

    after = (Clean,)

    def run(self, program: Program) -> Report:
        report = Report()
        graph = program.step.graph
        kinds = Kinds(graph)
        editor = Editor(program, graph)
        for node in list(graph.nodes):
            if node.target is aten.mean.dim:
                why = self._match(program, editor, kinds, node)
                if why:
                    report.refused.append(f"{node.name}: {why}")
                else:
                    report.changed += 1
            elif node.target is aten.rms_norm.default and len(node.args) > 2 and node.args[2]:
                x, _, weight, *eps = node.args
                with graph.inserting_before(node):
                    value = eps[0] if eps and eps[0] is not None else torch.finfo(torch.float32).eps
                    new = editor.call(rms_norm.default, x, weight, float(value), like=node)
                replace(node, new)
                report.changed += 1
        Clean().run(program)
        return report

    def _match(self, program: Program, editor: Editor, kinds: Kinds, mean: fx.Node) -> str:
        """Rewrite around one mean; the reason where it is no RMSNorm."""
        x = _squared(mean.args[0])
        if (
            x is None
            or mean.args[1] not in ([-1], [x.meta["val"].dim() - 1])
            or mean.args[2:] != (True,)
        ):
            return "not a mean of squares over the last axis"
        add = _only(mean, aten.add.Tensor, aten.add.Scalar)
        if add is None or not isinstance(add.args[1], float):
            return "no epsilon is added"
        inverse = _inverse_root(add)
        if inverse is None:
            return "no reciprocal square root follows"
        root = inverse.target is aten.sqrt.default
        scaled = _only(inverse, aten.div.Tensor if root else aten.mul.Tensor)
        if scaled is None or x not in scaled.args:
            return "the root does not scale the same value"
        weight, last = None, scaled
        user = _only(scaled, aten.mul.Tensor)
        if user is not None:
            other = next((a for a in user.args if a is not scaled), None)  # none: its square
            if (
                isinstance(other, fx.Node)
                and kinds[other] == "const"
                and other.meta["val"].dim() == 1
            ):
                weight, last = other, user
        graph = program.step.graph
        with graph.inserting_before(last):
            if weight is None:
                width = int(x.meta["val"].shape[-1])
                weight = editor.param(f"ones.{width}", torch.ones(width))
            new = editor.call(rms_norm.default, x, weight, add.args[1], like=last)
        replace(last, new)
        kinds[new] = "data"
        return ""


def _squared(node: object) -> fx.Node | None:
    if not isinstance(node, fx.Node) or not node.args or not isinstance(node.args[0], fx.Node):
        return None
    x = node.args[0]
    if node.target is aten.pow.Tensor_Scalar and node.args[1] == 2:
        return x
    if node.target is aten.square.default or (node.target is aten.mul.Tensor and node.args[1] is x):
        return x
    return None


def _inverse_root(add: fx.Node) -> fx.Node | None:
    direct = _only(add, aten.rsqrt.default)
    if direct is not None:
        return direct
    power = _only(add, aten.pow.Tensor_Scalar)
    if power is not None and power.args[1] == -0.5:
        return power
    root = _only(add, aten.sqrt.default)
    if root is None:
        return None
    return _only(root, aten.reciprocal.default) or (
        root if (d := _only(root, aten.div.Tensor)) is not None and d.args[1] is root else None
    )


def _only(node: fx.Node, *targets: object) -> fx.Node | None:
    """The one user of a node, where it is one of these operators."""
    users = list(node.users)
    return users[0] if len(users) == 1 and users[0].target in targets else None
