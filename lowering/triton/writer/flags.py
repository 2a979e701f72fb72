"""Flags that follow from a call's positions, tokens or slots and from the sizes of buffers: the host computes them from
its own copy of the call, so that it waits for nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from accel.ir.ops.pages import are_few_to_many, few_to_many

CALL = ("tokens", "positions", "slots", "rows")  # what each call of a step is given by the host
BY_SHAPES: Mapping[Any, Callable[..., bool]] = {few_to_many.default: are_few_to_many}
_MOST = 32  # operators of a flag


@dataclass(frozen=True)
class Flag:
    """A flag over inputs of the entry: by value those of CALL, of others the shapes. `alike`: equal for two flags that
    have one value in every call, such as those of two layers.
    """

    module: fx.GraphModule
    inputs: tuple[str, ...]
    alike: tuple[str, ...]

    def __call__(self, inputs: Mapping[str, Tensor]) -> bool:
        """It, for the inputs by name; those of CALL lie on the host."""
        with torch.no_grad():
            return bool(self.module(*(inputs[name] for name in self.inputs)).numpy())


def flag_of(node: fx.Node, names: Mapping[fx.Node, str]) -> Flag | None:
    """The flag that a node of a graph computes over its inputs, by name; None where it reads anything else."""
    needed = _ancestors(node, names)
    if needed is None:
        return None
    graph, made = fx.Graph(), dict[fx.Node, fx.Node]()
    inputs, read = list[str](), list[str]()
    for source in (s for call in needed for s in call.all_input_nodes if s not in needed):
        if source not in made:
            made[source] = graph.placeholder(f"x{len(inputs)}")
            inputs.append(name := names[_buffer(source)])
            read.append(name if name in CALL else str(_buffer(source).meta["val"].shape))
    for call in needed:
        args: Any = map_arg(call.args, made.__getitem__)
        kwargs: Any = map_arg(call.kwargs, made.__getitem__)
        if call.target in BY_SHAPES:
            said = graph.call_function(BY_SHAPES[call.target], args)
            made[call] = graph.call_function(torch.tensor, (said,))
        else:
            target: Any = call.target
            made[call] = graph.call_function(target, args, kwargs)
    graph.output(made[node])
    module = fx.GraphModule(torch.nn.Module(), graph)
    return Flag(module, tuple(inputs), (module.code, *read))


def _ancestors(node: fx.Node, names: Mapping[fx.Node, str]) -> list[fx.Node] | None:
    """The calls that a node is computed by, itself the last, in order; None where one of them reads values that the
    host does not have.
    """
    found: dict[fx.Node, None] = {}

    def all_of(call: fx.Node) -> bool:
        if call in found:
            return True
        by_shapes = call.target in BY_SHAPES
        if call.op != "call_function" or not isinstance(call.target, torch._ops.OpOverload):
            return False
        if call.kwargs.get("device") or len(found) >= _MOST:
            return False
        for source in call.all_input_nodes:
            known = _buffer(source) in names if by_shapes else names.get(source) in CALL
            if not known and (by_shapes or not all_of(source)):
                return False
        found[call] = None
        return True

    return list(found) if all_of(node) else None


def _buffer(node: fx.Node) -> fx.Node:
    """What a node is after it was written in place, of the same shape."""
    written: fx.Node = node.meta.get("writes", node)
    return written
