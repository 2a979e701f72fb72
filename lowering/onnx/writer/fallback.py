"""An operator without a lowering is lowered through torch's own decomposition, where it has one."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx
from torch._decomp import core_aten_decompositions
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from accel.ir.errors import LoweringError
from accel.lowering.onnx.writer.builder import Builder, Call, Param
from accel.lowering.onnx.writer.table import lower

aten = torch.ops.aten
_ALONG = frozenset({
    aten.sort, aten.argsort, aten.topk, aten.gather, aten.index_select, aten.index_copy,
    aten.index_add, aten.scatter, aten.scatter_add, aten.softmax, aten._softmax, aten.log_softmax, aten._log_softmax,
    aten.flip, aten.movedim, aten.nonzero, aten.one_hot,
})  # fmt: skip


def lower_node(b: Builder, node: fx.Node, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Lower one call; `args` and `kwargs` are the node's, with names in place of nodes."""
    made = _lowered(b, node, args, kwargs)
    if isinstance(made, str):
        b.lowered.setdefault(made, []).append(Call(node, args))
    return made


def _lowered(b: Builder, node: fx.Node, args: Any, kwargs: Mapping[str, Any]) -> Any:
    b.out = node.meta.get("val")
    special = b.variant.rules.get(node.target) if b.variant is not None else None
    if special is not None and (made := special(b, *args, **kwargs)) is not NotImplemented:
        b.varied += 1
        return made
    rule = lower.rules.get(node.target)
    if rule is not None:
        _check_axes(b, node, args)
        return rule(b, *args, **kwargs)
    return _decomposed(b, node, args, kwargs)


def _check_axes(b: Builder, node: fx.Node, args: Any) -> None:
    """Refuse what torch does along an axis that a tensor of rank 0 has not, and ONNX does not. Raises LoweringError."""
    along = isinstance(node.target, torch._ops.OpOverload) and node.target.overloadpacket in _ALONG
    if along and isinstance(args[0], str) and b.rank(args[0]) == 0:
        raise LoweringError(
            f"onnx: {node.target} of a tensor of rank 0 ({_place(node)}). Give it an axis (x[None]), "
            "or set target='eager'."
        )


def missing(node: fx.Node) -> LoweringError:
    """What to say of an operator that has no lowering."""
    return LoweringError(
        f"onnx: no lowering for {node.target} ({_place(node)}). "
        "Write one in lowering/onnx/rules/aten_*.py, or set target='eager'."
    )


def _place(node: fx.Node) -> str:
    """The node, and the module that it is of."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    return f"node {node.name}" + (f", from {stack[-1][0]}" if stack and stack[-1][0] else "")


@functools.cache
def _table() -> dict[Any, Callable[..., Any]]:
    """torch's decompositions, without those of operators that have a lowering."""
    table = dict(core_aten_decompositions())
    return {op: table[op] for op in table if op not in lower.rules}


def _decomposed(b: Builder, node: fx.Node, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Trace the operator's decomposition on the fake operands, then lower what it is made of."""
    op = node.target
    if not isinstance(op, torch._ops.OpOverload):
        raise missing(node)
    fakes, spec = pytree.tree_flatten((node.args, dict(node.kwargs)), is_leaf=_is_node)
    names = pytree.tree_leaves((args, dict(kwargs)), is_leaf=lambda x: isinstance(x, str))
    moving = [i for i, x in enumerate(fakes) if _is_node(x)]
    values = [fakes[i].meta["val"] for i in moving]
    if not moving:
        return b.constant(op(*node.args, **node.kwargs))
    mode = next((v.fake_mode for v in values if isinstance(v, FakeTensor)), None)
    if mode is None or (op not in _table() and not op._can_decompose()):
        raise missing(node)

    def call(*moved: Any) -> Any:
        leaves = list(fakes)
        for i, value in zip(moving, moved, strict=True):
            leaves[i] = value
        inner_args, inner_kwargs = pytree.tree_unflatten(leaves, spec)
        if op in _table():
            return _table()[op](*inner_args, **inner_kwargs)
        return op.decompose(*inner_args, **inner_kwargs)

    with mode, enable_python_dispatcher():
        inner = make_fx(call, decomposition_table=_table())(*values)
    if any(n.target is op for n in inner.graph.nodes):
        raise missing(node)
    outer = b.out
    try:
        result = lower_graph(b, inner, [names[i] for i in moving])
    except LoweringError as error:  # name what the user's model calls, not what it is made of
        raise missing(node) from error
    b.out = outer
    return result


def _is_node(x: Any) -> bool:
    return isinstance(x, fx.Node)


def lower_graph(b: Builder, module: fx.GraphModule, inputs: list[str]) -> Any:
    """Lower a graph of tensor operators over values that are written already."""
    env: dict[fx.Node, Any] = {}
    waiting = iter(inputs)
    for node in module.graph.nodes:
        if node.op == "placeholder":
            env[node] = next(waiting)
            continue
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), env.__getitem__)
        if node.op == "output":
            return args[0]
        if node.op == "get_attr":
            env[node] = Param(str(b.name(node.target)), getattr(module, node.target))
        elif getattr(node.target, "__name__", "") == "getitem":
            env[node] = args[0][args[1]]
        else:
            env[node] = lower_node(b, node, args, kwargs)
        if isinstance(env[node], str):
            b.meta.setdefault(env[node], node.meta.get("val"))
    return None
