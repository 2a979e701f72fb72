"""Gradients of a program: operators by their references, which have some, and those of the loss of a text."""

from __future__ import annotations

from collections import ChainMap, Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from accel.ir.ops.op import REFERENCES
from accel.ir.ops.rope import rope
from accel.ir.program import Program, compute, execute, operand
from accel.ir.region import Conditional, Region
from accel.passes.stream import Stream


class References:
    """An interpreter: references in place of operators, since those have gradients."""

    def graph(
        self, graph: fx.Graph, params: Mapping[str, Tensor], inputs: Mapping[str, Any]
    ) -> Any:
        """What a graph returns."""
        return execute(graph, params, inputs, self.value)

    def value(
        self,
        node: fx.Node,
        params: Mapping[str, Tensor],
        inputs: Mapping[str, Any],
        values: Mapping[fx.Node, Any],
    ) -> Any:
        """The value of one node, its operands known."""
        if not isinstance(node.target, Region) and node.target not in REFERENCES:
            return compute(node, params, inputs, values)
        args: Any = map_arg(node.args, lambda n: operand(n, params, values))
        kwargs: Any = map_arg(node.kwargs, lambda n: operand(n, params, values))
        if not isinstance(node.target, Region):
            return REFERENCES[node.target](*args, **kwargs)
        skipped = isinstance(node.target, Conditional) and not args[0]
        graph = node.target.otherwise if skipped else node.target.graph  # type: ignore[attr-defined]
        names = [str(p.target) for p in graph.find_nodes(op="placeholder")]
        return self.graph(graph, params, dict(zip(names, args, strict=True)))


@dataclass(frozen=True)
class Slope:
    """A parameter, and the gradient of a loss there, of its shape."""

    weight: Tensor
    gradient: Tensor


def layer_gradients(
    program: Program, calls: Sequence[fx.Node], tokens: Tensor
) -> Iterator[tuple[int, dict[str, Slope]]]:
    """Of each layer, the last first, the parameters that no other layer reads, by name, with the gradient of the mean
    loss of a token of rows [n,T] that has one before it. One layer's gradients are in memory, and the stream before
    each layer. Parameters are as the program holds them: of a norm by 1 + weight, the sum.
    """
    parameters = [_parameters(call) for call in calls]
    readers = Counter(name for names in parameters for name in names)
    stream = Stream(program, calls, tokens, References().value)
    states = [stream.start]
    with torch.no_grad():
        for i in range(len(calls)):
            states.append(stream.layer(i, states[-1]))
    with torch.enable_grad():
        x = states.pop().detach().requires_grad_()
        loss = stream.losses(x).sum() / (tokens.numel() - len(tokens))
        (slope,) = torch.autograd.grad(loss, x)
    for i in reversed(range(len(calls))):
        x = states.pop().detach().requires_grad_()
        found = ((name, program.params[name]) for name in parameters[i] if readers[name] == 1)
        weights = {n: w.detach().requires_grad_() for n, w in found if w.is_floating_point()}
        with torch.enable_grad():
            y = stream.layer(i, x, ChainMap(weights, program.params))
            wanted = [x, *weights.values()]
            slope, *gradients = torch.autograd.grad(
                y, wanted, slope, allow_unused=True, materialize_grads=True
            )
        yield (
            i,
            {
                name: Slope(weight.detach(), gradient)
                for (name, weight), gradient in zip(weights.items(), gradients, strict=True)
            },
        )


def _parameters(call: fx.Node) -> set[str]:
    """The names of a layer's parameters without tables of rotations."""
    region = call.target
    assert isinstance(region, Region)
    nodes = region.graph.find_nodes(op="get_attr")
    return {str(n.target) for n in nodes if not any(u.target is rope.default for u in n.users)}
