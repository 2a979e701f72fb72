"""Layers: stretches of the residual stream, each with its attention or recurrences, outlined."""

from __future__ import annotations

import operator
from collections.abc import Hashable
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from accel.ir.ops.rows import given_rows
from accel.ir.program import Program, ancestors
from accel.ir.region import LAYER, Region, sizes
from accel.passes import Pass, Report
from accel.passes.recognise.cuts import cut_points, layer_groups, parted
from accel.passes.recognise.region import numbering
from accel.passes.state.cache import Cache
from accel.passes.state.head import Head, scales
from accel.passes.state.outline import arguments, called, outlined

aten = torch.ops.aten


@dataclass(frozen=True)
class Layers(Pass):
    """Cut the graph where every path from tokens to logits passes one value, and outline the layers.

    The cut points are the dominators of the logits; a layer runs from the cut before one attention
    (or the recurrences of one block) to the cut before the next. The last layer ends at the last
    cut that joins two paths. The modules of a cascade (`DraftHead.cascade`), which all read the embedding, lie between
    marks.

    Before and after: `tests/passes/texts/layers.before.txt`, `layers.after.txt`.
    """

    after = (Cache, Head)

    def run(self, program: Program) -> Report:
        graph = program.step.graph
        cuts = cut_points(program)
        groups = layer_groups(program)
        if program.facts.stateless:
            return Report(refused=["no token reads another"])
        bounds = _marked(program) or _bounds(graph, cuts, [(g[0], g[-1]) for g in groups])
        if isinstance(bounds, str):
            return Report(refused=[bounds])
        start, before = bounds[0], ancestors(parted(graph), set())
        for index, end in enumerate(bounds[1:]):
            start = _outline(program, start, end, f"{LAYER}{index}", before)
        return Report(changed=len(bounds) - 1)


def _marked(program: Program) -> list[fx.Node]:
    """Where the modules of a cascade begin and end, whose marks are taken out; of another model none."""
    head = program.facts.draft_head
    if head is None or not head.cascade:
        return []
    found, graph = list[fx.Node](), program.step.graph
    _, *marks = graph.find_nodes(op="call_function", target=given_rows.default)
    for mark in marks:
        before = mark.args[0]
        assert isinstance(before, fx.Node)
        mark.replace_all_uses_with(before)
        graph.erase_node(mark)
        found.append(before)
    return found


def _bounds(
    graph: fx.Graph, cuts: list[fx.Node], layers: list[tuple[fx.Node, fx.Node]]
) -> list[fx.Node] | str:
    """The cut before each layer's first site, then the end of the last layer; or why there are none.

    `layers`: the first and the last site of each.
    """
    order = numbering(graph)
    starts: list[fx.Node] = []
    for site, _ in layers:
        before = [c for c in cuts if order[c] < order[site] and c.op == "call_function"]
        if not before:
            return f"{site.name}: no layer boundary between it and the tokens"
        if starts and starts[-1] is before[-1]:
            return f"{site.name} and the previous token mixer are in one layer"
        starts.append(before[-1])
    site = layers[-1][1]
    later = [c for c in cuts if order[c] > order[site]]
    joins = [c for c in later if _joins(c, alike=True)] or [c for c in later if _joins(c)]
    if not joins:
        return f"{site.name}: the residual stream ends after it"
    end = cuts.index(joins[-1])
    while end + 1 < len(cuts) and _of_layer(cuts[end + 1]):  # as in the others
        end += 1
    return [*starts, cuts[end]]


def _of_layer(node: fx.Node) -> bool:
    """Whether what comes behind the last join is still of the layer: another shape of it, or a number times it."""
    return node.target is aten.reshape.default or scales(node)


def _joins(node: fx.Node, alike: bool = False) -> bool:
    """Whether two paths meet here. `alike`: two values of its size, which is no value less its mean, as in a norm."""
    parents = [p for p in node.all_input_nodes if p.op == "call_function"]
    values = [p for p in parents if isinstance(p.meta.get("val"), Tensor)]
    return sum(not alike or sizes(p) == sizes(node) for p in values) > 1


def _outline(
    program: Program, start: fx.Node, end: fx.Node, name: str, before: set[fx.Node]
) -> fx.Node:
    """Move what lies between two values, but for what comes `before` all layers, into a Region called in place; returns
    the new `end`.
    """
    inside = _between(program.step.graph, start, end, before)
    members = set(inside)
    inputs = arguments(inside, start)
    leaving = [end, *(n for n in inside if n is not end and any(u not in members for u in n.users))]
    region = Region(name, outlined(inside, leaving, inputs, _names(program, inputs).__getitem__))
    stream, *_ = called(region, inputs, inside, leaving, end)
    return stream


def _between(graph: fx.Graph, start: fx.Node, end: fx.Node, before: set[fx.Node]) -> list[fx.Node]:
    """The nodes computed from `start` that `end` needs, or that branch off before it to state alone; not `before`."""
    below = ancestors([end], stop={start})
    found: dict[fx.Node, None] = {start: None}
    ended = False
    for node in graph.nodes:
        inside = node in below or not ended
        ended |= node is end
        if node is start or node in before:
            continue
        if inside and any(p in found for p in node.all_input_nodes):
            found[node] = None
        elif node.target is operator.getitem and node.args[0] in found:
            found[node] = None  # the state after a recurrence, which nothing in the layer reads
    del found[start]
    return list(found)


def _names(program: Program, inputs: list[fx.Node]) -> dict[fx.Node, str]:
    """Readable argument names: x for the stream, letters for sizes, inputs and outputs their own."""
    outputs = {node: name for name, node in program.step.output_nodes().items()}
    names: dict[fx.Node, str] = {}
    for i, node in enumerate(inputs):
        size = program.dims.get(str(node.meta["val"]))
        if i == 0:
            names[node] = "x"
        elif node.op == "placeholder":
            names[node] = str(node.target)
        else:
            names[node] = size or outputs.get(node, node.name)
    return names


def signature(graph: fx.Graph) -> Hashable:
    """What a region computes, up to the names and values of its parameters."""
    number = numbering(graph)

    def show(value: object) -> Hashable:
        if isinstance(value, fx.Node):
            return tuple(sizes(value)) if value.op == "get_attr" else number[value]
        if isinstance(value, (list, tuple)):
            return tuple(show(v) for v in value)
        return repr(value)

    return tuple((str(n.target), show(n.args)) for n in graph.nodes if n.op == "call_function")
