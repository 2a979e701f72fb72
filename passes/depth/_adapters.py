"""Adapters of low rank around the products of layers, for rows that leave out a layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from accel.ir.depth import RUN_ROWS
from accel.ir.errors import PassError
from accel.ir.program import Editor, Program
from accel.ir.region import Region, sizes
from accel.passes import Pass, Report, Rewriting
from accel.passes.adapters.lora import adapt
from accel.passes.depth._joint import holders, layers
from accel.passes.fuse.residual import Residual
from accel.passes.recognise.experts import routes
from accel.passes.state.layers import Layers

aten = torch.ops.aten
ADAPTER = "adapter"
_SLOW = 0.1  # what trained tensors are multiplied by: adapters learn at a lower rate than routers


def products(call: fx.Node) -> list[fx.Node]:
    """The products of each token with a weight, within a layer: those that have adapters."""
    region = call.target
    assert isinstance(region, Region)
    stream = sizes(_node(call.args[0]))[:-1]
    found = region.graph.find_nodes(op="call_function", target=aten.linear.default)
    return [n for n in found if sizes(_node(n.args[0]))[:-1] == stream and not routes(n)]


def widths(node: fx.Node) -> tuple[int, int]:
    """What a product takes, and what it gives."""
    out, into = (int(n) for n in _node(node.args[1]).meta["val"].shape)
    return into, out


def begin(call: fx.Node, rank: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Adapters of a layer that add nothing."""
    found: dict[str, Tensor] = {}
    for number, node in enumerate(products(call)):
        into, out = widths(node)
        drawn = torch.randn(into, rank, generator=generator) * into**-0.5 / _SLOW
        found |= {f"{ADAPTER}.{number}.a": drawn, f"{ADAPTER}.{number}.b": torch.zeros(rank, out)}
    return found


def parameters(layer: int, part: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A layer's adapters, as the program's parameters are called."""
    return {f"layer.{layer}.{n}": _SLOW * t for n, t in part.items() if n.startswith(ADAPTER)}


@dataclass(frozen=True)
class Adapts(Pass):
    """linear(x, W)  ->  linear(x, W) + x a b in each layer, of rows of the input `run_rows [B,L]` that leave one out.

    Others compute what the model does. It comes before weights are stored otherwise.
    """

    of: Rewriting
    key: str

    after = (Layers, Residual)
    stage = -1

    @property
    def method(self) -> Rewriting:
        """See Pass."""
        return self.of

    def run(self, program: Program) -> Report:
        """See Pass."""
        calls, parts = layers(program), program.parts[self.key]
        for layer, call in enumerate(calls):
            self._check(layer, products(call), parts[layer])
        insert(program, calls, [parts[layer] for layer in range(len(calls))])
        return Report(changed=sum(len(products(call)) for call in calls))

    def _check(self, layer: int, nodes: Sequence[fx.Node], part: Mapping[str, Tensor]) -> None:
        """Raises PassError: these are not this layer's adapters."""
        rank = next((t.shape[-1] for n, t in part.items() if n.startswith(ADAPTER)), 1)
        for number, node in enumerate(nodes):
            into, out = widths(node)
            for name, want in (("a", (into, rank)), ("b", (rank, out))):
                name = f"{ADAPTER}.{number}.{name}"
                has = tuple(part[name].shape) if name in part else ()
                if has != want:
                    raise PassError(
                        f"{self.key}: its file has {layer}.{name} of size {list(has)}, this model needs {list(want)}; "
                        "train it again for this model"
                    )


def insert(
    program: Program, calls: Sequence[fx.Node], parts: Sequence[Mapping[str, Tensor]]
) -> fx.Node:
    """Put adapters around the products of layers. Returns what they are multiplied by, [B,1,1]: 1 or 0."""
    editor = Editor(program, program.step.graph)
    batch = program.step.input("tokens").meta["val"].shape[0]
    rows = editor.placeholder(RUN_ROWS, (batch, len(calls)), torch.bool)
    program.step.defaults[RUN_ROWS] = torch.ones(1, len(calls), dtype=torch.bool)
    with editor.graph.inserting_before(calls[0]):
        some = editor.call(aten.any.dim, editor.call(aten.logical_not.default, rows), 1)
        gate = editor.call(aten.reshape.default, some, [-1, 1, 1])
        gate = editor.call(aten._to_copy.default, gate, dtype=torch.float32)
    for layer, (call, part) in enumerate(zip(calls, parts, strict=True)):
        region: Any = call.target
        nodes, tensors = products(call), parameters(layer, part)
        inside = holders(region.graph, call, [gate])[gate]
        call.args = (*call.args, gate)
        within = Editor(program, region.graph)
        for number, node in enumerate(nodes):
            names = [f"layer.{layer}.{ADAPTER}.{number}.{n}" for n in "ab"]
            with region.graph.inserting_before(node):
                a, b = (within.param(name, tensors[name]) for name in names)
            adapt(within, node, (a, b, inside))
    return gate


def _node(value: object) -> fx.Node:
    assert isinstance(value, fx.Node)
    return value
