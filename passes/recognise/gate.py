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
from accel.passes.recognise.rewrite import Rewrite, Rule, Site, Value, call

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


def _gate(at: Site, act: fx.Node, b: fx.Node) -> fx.Node | str:
    if len(act.users) > 1 or at.kinds[b] != "data" or sizes(act) != sizes(b) or b is act.args[0]:
        return "its other factor is no projection of that size"
    return at.call(gate.default, act.args[0], b, _activation(act))


@dataclass(frozen=True)
class Gates(Rewrite):
    """act(a) * b of equal shapes -> gate(a, b, act): the middle of a gated MLP.

    Before and after: `tests/passes/texts/gates.before.txt`, `gates.after.txt`.
    """

    after = (Clean, Activations)
    rules = (
        Rule(
            call(aten.mul.Tensor, Value("act", lambda a: _activation(a) is not None), Value("b")),
            _gate,
        ),
    )


def _activation(node: fx.Node) -> str | None:
    """The name of an activation, as the dialect writes it."""
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
