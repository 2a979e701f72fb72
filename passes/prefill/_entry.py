"""Entries made of the step: some of its layers, over the same weights and the same state."""

from __future__ import annotations

import operator

import torch
from torch import fx

from accel.ir.entries.compress import queries_of
from accel.ir.errors import PassError
from accel.ir.program import Editor, Program
from accel.ir.region import Conditional, Entry, Region
from accel.ir.region import layer_calls as layers_of
from accel.ir.state import writes_state
from accel.passes.clean.clean import remove_dead

aten = torch.ops.aten
_INPUTS = ("positions", "slots", "rows")  # of every entry, read or not


def layer_calls(program: Program, entry: Entry) -> list[fx.Node]:
    """The calls of all layers of an entry, in order. Raises PassError where they were not found."""
    calls = layers_of(entry.graph)
    count = len(program.facts.layers)
    if not calls or len(calls) != count:
        raise PassError(
            f"prefill, kv.reuse: {len(calls)} of {count} layers were found in the graph, but only separate layers "
            "can run for a prompt alone; leave the methods of both out for this model"
        )
    return calls


def copied(program: Program, first: int, last: int) -> tuple[Entry, list[fx.Node]]:
    """The step again, graphs of its own over the same parameters, and the calls of these layers, which
    run in any case. The first reads `stream` where others come before it.
    """
    entry = program.copy().step
    calls = layer_calls(program, entry)
    for call in calls:
        _always(call)
    if first:
        into = result(calls[first - 1], 0)
        value = into.meta["val"]
        stream = Editor(program, entry.graph).placeholder("stream", value.shape, value.dtype)
        into.replace_all_uses_with(stream)
        for node in entry.graph.find_nodes(op="call_function", target=aten.sym_size.int):
            if node.args[0] is entry.input("tokens"):
                node.update_arg(0, entry.input("positions"))
    return entry, calls[first : last + 1]


def _always(call: fx.Node) -> None:
    """A layer under a condition becomes one that runs."""
    region = call.target
    if isinstance(region, Conditional):
        first = next(iter(region.graph.find_nodes(op="placeholder")))
        region.graph.erase_node(first)
        call.target, call.args = Region(region.name, region.graph), call.args[1:]


def result(call: fx.Node, place: int) -> fx.Node:
    """One result of a layer."""
    return next(u for u in call.users if u.args[1] == place)


def states(program: Program, entry: Entry, calls: list[fx.Node]) -> list[tuple[str, fx.Node]]:
    """The state that these layers of an entry write, the positions of its slots among it, and what the step says of
    them outside.
    """
    read = {a for call in calls for a in call.args}
    positions = {s.output for s in program.state if s.positions}
    numbers = {i for i, call in enumerate(layer_calls(program, entry)) if call in calls}
    layers = {s.output: s.layer for s in program.state}
    return [
        (name, node)
        for name, node in entry.output_nodes().items()
        if writes_state(name) and (node in read if name in positions else layers[name] in numbers)
    ]


def observed(entry: Entry, first: int, last: int) -> dict[str, fx.Node]:
    """The queries of these layers of an entry, where the step gives them."""
    names = {queries_of(layer) for layer in range(first, last + 1)}
    return {n: v for n, v in entry.output_nodes().items() if n in names}


def finished(entry: Entry, calls: list[fx.Node], outputs: dict[str, fx.Node]) -> Entry:
    """The entry with these outputs and no more than they need."""
    entry.set_outputs(outputs)
    for call in reversed(calls):
        remove_dead(entry.graph)
        _shrink(call)
    remove_dead(entry.graph)
    for holder in entry.graph.find_nodes(op="placeholder"):
        if not holder.users and holder.target not in _INPUTS:
            entry.graph.erase_node(holder)
    if {"tokens", "stream"} <= set(entry.inputs):
        raise PassError(
            "prefill.prune, kv.reuse: deeper layers of this model read the tokens again, not only the output of "
            "earlier layers; leave the methods of both out for it (gemfilter and paged-prefix cut no layers)"
        )
    return Entry(
        entry.graph, entry.outputs, {n: v for n, v in entry.defaults.items() if n in entry.inputs}
    )


def _shrink(call: fx.Node) -> None:
    """Let a layer give what is read of it, and take what that needs."""
    region = call.target
    assert isinstance(region, Region)
    if isinstance(region, Conditional):
        return  # both of its graphs take and give the same
    (out,) = region.graph.find_nodes(op="output")
    results, items = out.args[0], sorted(call.users, key=lambda item: item.args[1])  # type: ignore
    assert isinstance(results, tuple)
    out.args = (tuple(results[item.args[1]] for item in items),)  # type: ignore[index]
    for place, item in enumerate(items):
        item.args = (call, place)
    call.meta["val"] = tuple(item.meta["val"] for item in items)
    remove_dead(region.graph)
    holders = list(region.graph.find_nodes(op="placeholder"))
    call.args = tuple(a for a, holder in zip(call.args, holders, strict=True) if holder.users)
    for holder in holders:
        if not holder.users:
            region.graph.erase_node(holder)


def added(call: fx.Node, node: fx.Node) -> fx.Node:
    """Let a layer give one of its values too."""
    region = call.target
    assert isinstance(region, Region)
    (out,) = region.graph.find_nodes(op="output")
    results = out.args[0]
    assert isinstance(results, tuple)
    out.args = ((*results, node),)
    call.meta["val"] = (*call.meta["val"], node.meta["val"])
    with call.graph.inserting_after(call):
        item = call.graph.call_function(operator.getitem, (call, len(results)))
    item.meta["val"] = node.meta["val"]
    return item
