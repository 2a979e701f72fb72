"""A tensor that is filled piece by piece is the concatenation of the pieces."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from accel.ir.program import Editor, Program

aten = torch.ops.aten


def join_pieces(program: Program, graph: fx.Graph) -> int:
    """slice_scatter(slice_scatter(empty, a, …), b, …), of pieces that fill an axis  ->  cat([a, b])."""
    changed = 0
    for node in list(graph.find_nodes(op="call_function", target=aten.copy.default)):
        to, value = node.args[:2]
        if _alike(to, value):
            node.replace_all_uses_with(value)
            graph.erase_node(node)
            changed += 1
    for node in reversed(
        list(graph.find_nodes(op="call_function", target=aten.slice_scatter.default))
    ):
        pieces = _pieces(node) if node.users else None
        if pieces is None:
            continue
        editor = Editor(program, graph)
        with graph.inserting_before(node):
            new = editor.call(aten.cat.default, pieces, _axis(node), like=node)
        node.replace_all_uses_with(new)
        graph.erase_node(node)
        changed += 1
    return changed


def _pieces(node: fx.Node) -> list[fx.Node] | None:
    """What the last axis-wise writes put into the whole of an axis, in its order; none where something is left."""
    axis, found = _axis(node), dict[int, tuple[int, fx.Node]]()
    size: Any = node.meta["val"].shape[axis]
    here: Any = node
    while isinstance(here, fx.Node) and here.target is aten.slice_scatter.default:
        base, piece, _, start, end, step = _arguments(here)
        if _axis(here) != axis or step != 1 or not isinstance(size, int):
            return None
        if piece.meta["val"].dtype != node.meta["val"].dtype:
            return None
        start, end = (
            min(v + size if v < 0 else v, size) for v in (start or 0, size if end is None else end)
        )
        if any(start < stop and begin < end for begin, (stop, _) in found.items()):
            return None
        found[start] = end, piece
        reach, pieces = 0, []
        while reach in found:
            reach, piece = found[reach]
            pieces.append(piece)
        if reach == size:
            return pieces
        here = base
    return None


def _arguments(node: fx.Node) -> list[Any]:
    given = dict(zip(("self", "src", "dim", "start", "end", "step"), node.args, strict=False))
    given = {"dim": 0, "start": None, "end": None, "step": 1} | given | node.kwargs
    return [given[n] for n in ("self", "src", "dim", "start", "end", "step")]


def _axis(node: fx.Node) -> int:
    axis = int(_arguments(node)[2])
    return axis % len(node.meta["val"].shape)


def _alike(to: Any, value: Any) -> bool:
    """Whether a copy of a value into another place changes neither its shape nor its type."""
    if not isinstance(to, fx.Node) or not isinstance(value, fx.Node):
        return False
    a, b = to.meta["val"], value.meta["val"]
    return a.dtype == b.dtype and list(map(str, a.shape)) == list(map(str, b.shape))
