"""Where only the last parts of a packed product are read, only their rows are multiplied."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from accel.ir.ops.quantized import quantized_linear
from accel.ir.program import Editor, Program
from accel.ir.region import sizes
from accel.passes.clean.clean import remove_dead

aten = torch.ops.aten
# operands of a product that have an entry for each row of its weight
_ROWS: dict[Any, tuple[int, ...]] = {
    aten.linear.default: (1, 2),
    quantized_linear.default: (1, 2, 3, 4),
}


def narrow(program: Program, graph: fx.Graph) -> None:
    """split(linear(x, [q; k; v]))[1:]  ->  split(linear(x, [k; v])), with a layout of heads between."""
    for split in list(graph.find_nodes(op="call_function", target=aten.split_with_sizes.default)):
        read = {int(u.args[1]) for u in split.users}
        first = min(read)
        chain = _chain(split)
        if first and chain:
            _rebuild(program, graph, [*chain, split], first)
    remove_dead(graph)


def _chain(split: Any) -> list[fx.Node]:
    """A product and what lays out its heads, down to the split; nothing where it is not of that form."""
    source = split.args[0]
    axis, rank = split.args[2] if len(split.args) > 2 else 0, len(sizes(source))
    chain = [source]
    if source.target is aten.transpose.int and axis == 1 and rank == 4:
        shaped = source.args[0]
        if {a % 4 for a in source.args[1:]} != {1, 2} or shaped.target is not aten.reshape.default:
            return []
        chain = [shaped.args[0], shaped, source]
    elif axis % rank != rank - 1:
        return []
    alone = all(len(n.users) == 1 for n in chain)
    return chain if alone and chain[0].target in _ROWS and len(sizes(chain[0])) == 3 else []


def _rebuild(program: Program, graph: fx.Graph, chain: Sequence[fx.Node], first: int) -> None:
    linear, *layout, split = chain
    counts: Any = split.args[1]
    width = int(sizes(linear)[-1]) // sum(counts)  # rows of the product for each part's unit
    start = width * sum(counts[:first])
    with graph.inserting_before(split):
        editor = Editor(program, graph)
        args = [
            _below(editor, a, start) if i in _ROWS[linear.target] else a
            for i, a in enumerate(linear.args)
        ]
        value = editor.call(linear.target, *args, like=linear)  # type: ignore[arg-type]
        for node in layout:
            more: Any = list(node.args[1:])
            if node.target is aten.reshape.default:
                more = [[*more[0][:2], sum(counts[first:]), int(sizes(node)[3])]]
            value = editor.call(node.target, value, *more, like=node)  # type: ignore[arg-type]
        new = editor.call(split.target, value, counts[first:], *split.args[2:], like=split)  # type: ignore[arg-type]
        for item in list(split.users):
            part = editor.call(operator.getitem, new, int(item.args[1]) - first, like=item)  # type: ignore[arg-type]
            item.replace_all_uses_with(part)


def _below(editor: Editor, operand: Any, start: int) -> Any:
    """An operand without its first rows."""
    if not isinstance(operand, fx.Node):
        return operand

    if operand.op == "call_function":  # a cast of a parameter
        assert callable(operand.target)
        below = _below(editor, operand.args[0], start)
        return editor.call(operand.target, below, *operand.args[1:], like=operand, **operand.kwargs)

    def rows(whole: Tensor) -> Tensor:
        return whole[start:]

    name = str(operand.target)
    return editor.derived(f"{name}[{start}:]", name, rows)
