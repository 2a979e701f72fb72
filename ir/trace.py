"""A pure function of tensors becomes nodes of a graph: how a method that computes on tensors gets in."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._dispatch.python import enable_python_dispatcher
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_aggregate, map_arg

from accel.ir.errors import PassError
from accel.ir.functional import without_writes
from accel.ir.program import Editor
from accel.ir.specialization import no_specialization
from accel.ir.versions import remembered_sizes


def trace(
    editor: Editor,
    name: str,
    function: Callable[..., Any],
    *operands: fx.Node,
    like: fx.Node | None = None,
    key: Any = None,
) -> Any:
    """Insert what `function` does with the operands at the graph's insertion point.

    It is run once on their fake values, sizes symbolic; operators of the dialect stay whole. A tensor
    of numbers that it names (`torch.tensor`) becomes a parameter. Returns the node, or nested tuples
    and dicts of nodes, as the function does.

    `key`: hashable; what is traced under one key is the same function. It is traced once for operands that
    differ only in which symbols their sizes are: layers, and programs that share `traces`, cost little more than
    the first.

    Raises:
        PassError: the function takes a symbolic size as a number, and would be wrong at other lengths; or it
            writes into a tensor that something else reads.
    """
    values = _apart(editor, [o.meta["val"] for o in operands])
    known, form = editor.program.traces, (key, _form(values))
    if key is not None and form in known:
        traced, before = known[form]
    else:
        if (sizes := editor.fake.shape_env) is not None:
            sizes.pending_fresh_unbacked_symbols.clear()  # of what failed before, in a program that is shared
        with (
            no_specialization(editor, name),
            remembered_sizes(),
            editor.fake,
            enable_python_dispatcher(),
            torch.no_grad(),
        ):
            traced, before = make_fx(function, pre_dispatch=True)(*values), values
        _check_writes(traced.graph, name)
        if key is not None:
            known[form] = traced, values
    renamed = Renamed(editor, before, values)
    env: dict[fx.Node, Any] = {}
    waiting = iter(operands)
    for node in traced.graph.nodes:
        if node.op == "placeholder":
            env[node] = next(waiting)
        elif node.op == "output":
            return map_arg(node.args[0], env.__getitem__)
        elif node.op == "get_attr":
            env[node] = _constant(editor, f"{name}.{node.target}", getattr(traced, node.target))
        else:
            args: Any = map_arg(node.args, env.__getitem__)
            kwargs: Any = map_arg(node.kwargs, env.__getitem__)
            if node.target is operator.getitem and isinstance(args[0], (tuple, list)):
                env[node] = args[0][args[1]]
                continue
            env[node] = made = editor.graph.call_function(node.target, args, kwargs)
            made.meta["val"] = renamed(node.meta["val"])
            if like is not None and "layer" in like.meta:
                made.meta["layer"] = like.meta["layer"]
    raise ValueError(f"{name} returns nothing")


def _check_writes(graph: fx.Graph, name: str) -> None:
    """Replace writes by what gives the same; raise PassError where one is left, which passes would take for unused."""
    without_writes(graph)
    for node in graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if schema is not None and schema.is_mutable:
            raise PassError(
                f"{name}: the function writes into a tensor ({node.target}), and a graph holds values only; make a new "
                "one: torch.where, masked_fill, cat or scatter instead of `x[...] = y`, x + y instead of `x += y`"
            )


def _constant(editor: Editor, name: str, value: Tensor) -> fx.Node:
    """Read a parameter of this value: one of that name, or of the next free one where that holds something else."""
    params, number, free = editor.program.params, 0, name
    while free in params and not _equal(params[free], value):
        number += 1
        free = f"{name}.{number}"
    return editor.param(free, value)


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a, b)


def _expr(size: Any) -> Any:
    return size.node.expr if isinstance(size, torch.SymInt) else size


def _apart(editor: Editor, values: Sequence[Any]) -> list[Any]:
    """Values of which no two are one object: the tracer tells operands apart by that, and nodes may share."""
    found: list[Any] = []
    for value in values:
        if isinstance(value, Tensor) and any(value is other for other in found):
            with editor.fake:
                value = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
        found.append(value)
    return found


def _sizes(values: Sequence[Tensor]) -> list[Any]:
    return [size for value in values for size in value.shape]


def _form(values: Sequence[Tensor]) -> Any:
    """What the traced graph depends on: types, and sizes up to the names of symbols."""
    names: dict[str, int] = {}
    shapes = [
        tuple(
            s if isinstance(s, int) else ("symbol", names.setdefault(str(s), len(names)))
            for s in v.shape
        )
        for v in values
    ]
    return tuple((v.dtype, shape) for v, shape in zip(values, shapes, strict=True))


class Renamed:
    """Fake values of one trace, as they are with other symbols as the operands' sizes, or in another program."""

    def __init__(self, editor: Editor, before: Sequence[Tensor], now: Sequence[Tensor]):
        self.fake = editor.fake
        self.made: dict[Any, Tensor] = {}  # by type and sizes before: most nodes share theirs
        self.elsewhere = any(getattr(v, "fake_mode", self.fake) is not self.fake for v in before)
        self.symbols = {
            a.node.expr: b.node.expr
            for a, b in zip(_sizes(before), _sizes(now), strict=True)
            if isinstance(a, torch.SymInt) and a.node.expr != b.node.expr
        }

    def __call__(self, value: Any) -> Any:
        return map_aggregate(value, self._one) if self.symbols or self.elsewhere else value

    def _one(self, value: Any) -> Any:
        if isinstance(value, torch.SymInt):
            return self._size(value)
        if not isinstance(value, Tensor):
            return value
        key = value.dtype, *(tuple(map(_expr, part)) for part in (value.shape, value.stride()))
        if key not in self.made:
            shape, stride = (
                [self._size(s) for s in part] for part in (value.shape, value.stride())
            )
            with self.fake:
                self.made[key] = torch.empty_strided(shape, stride, dtype=value.dtype)
        return self.made[key]

    def _size(self, size: Any) -> Any:
        if not isinstance(size, torch.SymInt):
            return size
        expr = size.node.expr  # C + P0 + Q0 holds P0 + Q0, but not as a part of its tree
        sums = any(not old.is_Symbol for old in self.symbols)
        other = expr.subs(self.symbols, simultaneous=True) if sums else expr.xreplace(self.symbols)
        return self.fake.shape_env.create_symintnode(other, hint=None)
