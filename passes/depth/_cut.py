"""Deleting branches of layers: an MLP leaves its layer; what is left of a layer without attention goes to the layer
before it, as a layer is what has a cache.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence

import torch
from torch import fx

from accel.ir.errors import PassError
from accel.ir.ops.norm import add_rms_norm, rms_norm
from accel.ir.program import Editor, Program
from accel.ir.region import Region
from accel.passes.clean.clean import remove_dead
from accel.passes.depth._branches import Branches, Term
from accel.passes.depth._remove import remove
from accel.passes.stream import stream_after

aten = torch.ops.aten


def cut(
    program: Program,
    calls: Sequence[fx.Node],
    layers: Sequence[Branches],
    attention: Collection[int],
    mlp: Collection[int],
) -> None:
    """Take the attention of some layers, none of them the first, and the MLP of some out of the step."""
    for terms, gone in (([b.attention for b in layers], attention), ([b.mlp for b in layers], mlp)):
        for index in gone:
            for term in terms[index]:
                _leave_out(program, term)
    for branches in layers:
        remove_dead(branches.graph)
    before = calls[0]
    for index, call in enumerate(calls):
        if index in attention:
            _join(before, call)
        else:
            before = call
    remove(program, calls, sorted(attention))


def _leave_out(program: Program, term: Term) -> None:
    """x + f  ->  x; norm(x + f)  ->  norm(x)."""
    if not term.total.users:  # x + (f + g), of which g has gone before
        (total,) = (user for user in term.value.users if user is not term.total)
        term = Term(total, total.args.index(term.value))
    total, carried = term.total, term.carried
    if total.op == "call_function" and isinstance(total.meta["val"], (tuple, list)):
        graph = total.graph
        for item in list(total.users):
            if item.target is operator.getitem and item.args[1] == 0:
                with graph.inserting_before(item):
                    editor = Editor(program, graph)
                    normed = _norm(editor, total, carried)
                item.replace_all_uses_with(normed)
            else:
                item.replace_all_uses_with(carried)
    else:
        total.replace_all_uses_with(carried)


def _norm(editor: Editor, both: fx.Node, x: fx.Node) -> fx.Node:
    """The norm of a sum and a norm in one, of x alone."""
    if both.target is add_rms_norm.default:
        return editor.call(rms_norm.default, x, *both.args[2:], like=both)
    weight, bias, eps = both.args[2:]
    width = x.meta["val"].shape[-1]
    return editor.call(aten.layer_norm.default, x, [width], weight, bias, eps, like=both)


def _join(first: fx.Node, second: fx.Node) -> None:
    """layer.1(layer.0(x)), where the second has no state left  ->  layer.0, which computes both."""
    one, two = first.target, second.target
    assert isinstance(one, Region) and isinstance(two, Region)
    (last,) = two.graph.find_nodes(op="output")
    last.args = ((last.args[0][0],),)
    remove_dead(two.graph)
    (out,) = one.graph.find_nodes(op="output")
    stream, *results = out.args[0]
    holders = dict(zip(first.args, one.graph.find_nodes(op="placeholder"), strict=True))
    copied: dict[fx.Node, fx.Node] = {}
    for holder, argument in zip(two.graph.find_nodes(op="placeholder"), second.args, strict=True):
        if argument is stream_after(first):
            copied[holder] = stream
        elif holder.users:
            if argument not in holders:
                holders[argument] = _argument(first, one, argument, str(holder.target))
            copied[holder] = holders[argument]
    end = last.args[0][0]
    for node in two.graph.nodes:
        if node.op not in ("placeholder", "output"):
            with one.graph.inserting_before(out):
                copied[node] = one.graph.node_copy(node, copied.__getitem__)
            copied[node].meta = dict(node.meta)
    out.args = ((copied[end], *results),)
    stream_after(second).replace_all_uses_with(stream_after(first))


def _argument(call: fx.Node, region: Region, value: object, name: str) -> fx.Node:
    """One more argument of a layer's call, and its placeholder."""
    if isinstance(value, fx.Node) and value.op == "call_function":
        order = list(call.graph.nodes)
        if order.index(value) > order.index(call):
            raise PassError(
                f"depth: {region.name} is called before {value.name}, which a later layer's MLP reads, so that layer's "
                "attention cannot be deleted alone; delete whole layers, such as by shortgpt"
            )
    with region.graph.inserting_after(region.graph.find_nodes(op="placeholder")[-1]):
        holder = region.graph.placeholder(name)
    assert isinstance(value, fx.Node)
    holder.meta = dict(value.meta)
    call.args = (*call.args, value)
    return holder
