"""A pure function of tensors becomes nodes of a graph: how a method that computes on tensors gets in."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_arg

from accel.ir.program import Editor


def trace(
    editor: Editor,
    name: str,
    function: Callable[..., Any],
    *operands: fx.Node,
    like: fx.Node | None = None,
) -> Any:
    """Insert what `function` does with the operands at the graph's insertion point.

    It is run once on their fake values, sizes symbolic; operators of the dialect stay whole. A tensor
    that it makes out of nothing becomes a parameter `<name>.<n>`. Returns the node, or nested tuples
    and dicts of nodes, as the function does.
    """
    values = [o.meta["val"] for o in operands]
    with editor.fake, enable_python_dispatcher(), torch.no_grad():
        traced = make_fx(function)(*values)
    env: dict[fx.Node, Any] = {}
    waiting = iter(operands)
    for node in traced.graph.nodes:
        if node.op == "placeholder":
            env[node] = next(waiting)
        elif node.op == "output":
            return map_arg(node.args[0], env.__getitem__)
        elif node.op == "get_attr":
            env[node] = editor.param(f"{name}.{node.target}", getattr(traced, node.target))
        else:
            args: Any = map_arg(node.args, env.__getitem__)
            kwargs: Any = map_arg(node.kwargs, env.__getitem__)
            if node.target is operator.getitem and isinstance(args[0], (tuple, list)):
                env[node] = args[0][args[1]]
                continue
            env[node] = made = editor.graph.call_function(node.target, args, kwargs)
            made.meta["val"] = node.meta["val"]
            if like is not None and "layer" in like.meta:
                made.meta["layer"] = like.meta["layer"]
    raise ValueError(f"{name} returns nothing")
