"""Nodes of a graph that become a graph of their own, called in place."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence

from torch import fx

from accel.ir.region import Region


def arguments(members: Sequence[fx.Node], first: fx.Node) -> list[fx.Node]:
    """What the members read of values outside, `first` before all others; parameters are read in place."""
    inside = set(members)
    parents = (p for node in members for p in node.all_input_nodes)
    return list(
        dict.fromkeys([first, *(p for p in parents if p not in inside and p.op != "get_attr")])
    )


def outlined(
    members: Sequence[fx.Node],
    leaving: Sequence[fx.Node],
    inputs: Sequence[fx.Node],
    name: Callable[[fx.Node], str],
) -> fx.Graph:
    """A graph from `inputs`, each with its name, to `leaving`."""
    graph = fx.Graph()
    copied: dict[fx.Node, fx.Node] = {}
    for argument in inputs:
        copied[argument] = graph.placeholder(name(argument))
        copied[argument].meta = dict(argument.meta)
    for node in members:
        for parent in node.all_input_nodes:
            if parent.op == "get_attr" and parent not in copied:
                copied[parent] = graph.node_copy(parent)
                copied[parent].meta = dict(parent.meta)
        copied[node] = graph.node_copy(node, copied.__getitem__)
        copied[node].meta = dict(node.meta)
    graph.output(tuple(copied[n] for n in leaving))
    return graph


def called(
    region: Region,
    inputs: Sequence[fx.Node],
    members: Sequence[fx.Node],
    leaving: Sequence[fx.Node],
    after: fx.Node,
) -> list[fx.Node]:
    """Call a region after a node, in place of the members, whose results `leaving` are its own. Returns these, anew."""
    graph, inside = after.graph, set(members)
    with graph.inserting_after(after):
        call = graph.call_function(region, tuple(inputs))
    call.meta["val"] = tuple(n.meta["val"] for n in leaving)
    items = [call]
    for i, node in enumerate(leaving):
        with graph.inserting_after(items[-1]):
            item = graph.call_function(operator.getitem, (call, i))
        item.meta["val"] = node.meta["val"]
        node.replace_all_uses_with(item, delete_user_cb=lambda user: user not in inside)
        items.append(item)
    for node in reversed(members):
        graph.erase_node(node)
    for node in reversed(list(graph.nodes)):
        if node.op == "get_attr" and not node.users:
            graph.erase_node(node)
    return items[1:]
