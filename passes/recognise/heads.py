"""Values that hold batch and heads in front of [T,X], whatever the axes: read and viewed as [B,H,T,X]."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from accel.ir.program import Editor, Program
from accel.ir.region import sizes
from accel.passes.recognise.region import Kinds, numbering, packet, source, try_out

aten = torch.ops.aten


def concrete(program: Program, node: fx.Node, batch: int, length: int) -> list[int]:
    """The axes of a value for so many rows and tokens."""
    letter = _expression(program.step.input("tokens").meta["val"].shape[0])
    found = []
    for size in map(_expression, node.meta["val"].shape):
        symbols = getattr(size, "free_symbols", ())
        values = {s: batch if s == letter else length for s in symbols}
        found.append(int(size.subs(values)) if symbols else int(size))
    return found


def count_heads(program: Program, node: fx.Node) -> int:
    """How many [T,X] there are per row of the batch; 0 where that is no fixed number."""
    batch = _expression(program.step.input("tokens").meta["val"].shape[0])
    ratio = math.prod(map(_expression, node.meta["val"].shape[:-2])) / batch
    return int(ratio) if getattr(ratio, "is_Integer", False) else 0


def _expression(size: Any) -> Any:
    """A number, or the symbols of a symbolic size."""
    return size.node.expr if isinstance(size, torch.SymInt) else size


def as_heads(program: Program, kinds: Kinds, node: fx.Node) -> fx.Node | str:
    """The value as [B,H,T,X], or why it is none."""
    batch, shape = sizes(program.step.input("tokens"))[0], sizes(node)
    heads = count_heads(program, node)
    if len(shape) < 3 or not heads:
        return f"{node.name} {shape} does not hold [B,H,T,D]"
    if shape[0] != batch and not _rows_in_front(program, kinds, node):
        return f"{node.name} {shape} holds heads before the rows of the batch"
    if len(shape) == 4 and shape[0] == batch:
        return node
    before = node.args[0] if node.target is aten.reshape.default else None
    if isinstance(before, fx.Node) and sizes(before) == [batch, str(heads), *shape[-2:]]:
        return before
    editor = Editor(program, node.graph)
    last: list[Any] = []
    here = node
    for axis in (-2, -1):
        size = shape[axis]
        if size.isdigit():
            last.append(int(size))
            continue
        with node.graph.inserting_after(here):
            here = editor.call(aten.sym_size.int, node, len(shape) + axis)
        last.append(here)
    with node.graph.inserting_after(here):
        return editor.call(aten.reshape.default, node, [-1, heads, *last], like=node)


def _rows_in_front(program: Program, kinds: Kinds, node: fx.Node) -> bool:
    """Whether axis 0 counts the batch before the heads: changing a row changes its part alone."""
    batch = sizes(program.step.input("tokens"))[0]
    origin = source(node, kinds, numbering(node.graph), lambda n: batch in sizes(n))
    if origin is None:
        return False
    axis = sizes(origin).index(batch)  # 1 in a model of [T,B,E]
    x = torch.randn(*concrete(program, origin, 2, 3), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(3).repeat(2, 1)
    before = try_out(program, node, {origin: x}, positions)
    other = x.clone()
    other.select(axis, 1).add_(1)
    after = try_out(program, node, {origin: other}, positions)
    changed = (before != after).reshape(2, -1).any(1)
    return bool(changed[1] and not changed[0])


def swapped(program: Program, node: fx.Node) -> fx.Node:
    """[.., D, S] -> [.., S, D], joined with the permutation that made the node."""
    rank = len(sizes(node))
    order = list(range(rank))
    before = node
    if packet(node) in (aten.transpose, aten.permute):
        given: Any = node.args
        before = given[0]
        if packet(node) is aten.permute:
            order = [a % rank for a in given[1]]
        else:
            a, b = given[1] % rank, given[2] % rank
            order[a], order[b] = order[b], order[a]
    order[-1], order[-2] = order[-2], order[-1]
    if order == list(range(rank)):
        return before
    editor = Editor(program, node.graph)
    with node.graph.inserting_after(node):
        return editor.call(aten.permute.default, before, order, like=node)


def restore(program: Program, value: fx.Node, old: fx.Node) -> fx.Node:
    """[B,H,T,X] with the axes of the node that it replaces."""
    want = sizes(old)
    if want == sizes(value):
        return value
    for user in list(old.users):  # which often wants [B,H,T,X] itself
        if user.target is aten.reshape.default and sizes(user) == sizes(value):
            user.replace_all_uses_with(value)
            user.graph.erase_node(user)
    editor = Editor(program, value.graph)
    with value.graph.inserting_after(value):
        length = editor.call(aten.sym_size.int, value, 2)
    inner = [int(s) for s in want[1:-2]]
    with value.graph.inserting_after(length):
        return editor.call(
            aten.reshape.default, value, [-1, *inner, length, int(want[-1])], like=value
        )
