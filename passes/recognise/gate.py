"""Activations written out, and gated MLPs: act(gate) * up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from accel.ir.ops.norm import ACTIVATIONS, gate
from accel.ir.program import Editor, Program
from accel.ir.region import sizes
from accel.passes import Pass, Report
from accel.passes.clean.clean import Clean, replace
from accel.passes.recognise.region import Kinds, close, numbering, source, try_out

aten = torch.ops.aten


@dataclass(frozen=True)
class Activations(Pass):
    """0.5 x (1 + tanh(√(2/π)(x + 0.044715 x³))) -> gelu(x, tanh), recognised on numbers."""

    after = (Clean,)

    def run(self, program: Program) -> Report:
        report = Report()
        graph = program.step.graph
        kinds, order = Kinds(graph), numbering(graph)
        editor = Editor(program, graph)
        for node in list(graph.find_nodes(op="call_function", target=aten.tanh.default)):
            for last in _downstream(node, 3):
                x = source(last, kinds, order, lambda x, y=last: _is_gelu(program, x, y))  # type: ignore[misc]
                if x is not None:
                    with graph.inserting_before(last):
                        new = editor.call(aten.gelu.default, x, approximate="tanh", like=last)
                    replace(last, new)
                    report.changed += 1
                    break
        Clean().run(program)
        return report


@dataclass(frozen=True)
class Gates(Pass):
    """act(a) * b of equal shapes -> gate(a, b, act): the middle of a gated MLP."""

    after = (Clean, Activations)

    def run(self, program: Program) -> Report:
        report = Report()
        graph = program.step.graph
        kinds = Kinds(graph)
        editor = Editor(program, graph)
        for node in list(graph.find_nodes(op="call_function", target=aten.mul.Tensor)):
            for a, b in (node.args[:2], node.args[1::-1]):
                act = _activation(a)
                if act is None or not isinstance(a, fx.Node) or not isinstance(b, fx.Node):
                    continue
                if len(a.users) > 1 or kinds[b] != "data" or sizes(a) != sizes(b) or b is a.args[0]:
                    report.refused.append(
                        f"{node.name}: its other factor is no projection of that size"
                    )
                    continue
                with graph.inserting_before(node):
                    new = editor.call(gate.default, a.args[0], b, act, like=node)
                replace(node, new)
                report.changed += 1
                break
        Clean().run(program)
        return report


def _activation(node: object) -> str | None:
    """The name of an activation, as the dialect writes it."""
    if not isinstance(node, fx.Node):
        return None
    if node.target is aten.gelu.default:
        return "gelu_tanh" if node.kwargs.get("approximate") == "tanh" else "gelu"
    names: dict[Any, str] = {
        aten.silu.default: "silu",
        aten.relu.default: "relu",
        aten.sigmoid.default: "sigmoid",
    }
    return names.get(node.target)


def _downstream(node: fx.Node, steps: int) -> list[fx.Node]:
    """The values reached from a node along its users, nearest first."""
    found, edge = [], [node]
    for _ in range(steps):
        edge = [u for n in edge for u in n.users if u.op == "call_function"]
        found += edge
    return found


def _is_gelu(program: Program, x: fx.Node, out: fx.Node) -> bool:
    if not isinstance(x.meta.get("val"), Tensor) or sizes(x) != sizes(out) or len(sizes(x)) != 3:
        return False
    value = torch.linspace(-6, 6, 2 * int(sizes(x)[2])).reshape(1, 2, -1)
    got = try_out(program, out, {x: value}, torch.arange(2)[None])
    return close(got, ACTIVATIONS["gelu_tanh"](value), 1e-5)
