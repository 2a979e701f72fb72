"""The joint: parts of the step as entries of their own, up to a layer that says what a prompt's tokens are worth."""

from __future__ import annotations

import operator
from collections.abc import Callable

import torch
from torch import Tensor, fx

from accel.ir.errors import PassError
from accel.ir.ops.attention import attention
from accel.ir.program import Conditional, Editor, Entry, Program, Region, ancestors
from accel.ir.trace import trace
from accel.passes.clean.clean import remove_dead
from accel.passes.prefill.prune._layer import layer_calls, near

aten = torch.ops.aten
_INPUTS = ("positions", "slots", "rows")  # of every part, read or not


def scoring(
    program: Program, first: int, last: int, score: Callable[[Tensor, Tensor], Tensor], kernel: int,
    *, whole: bool,
) -> Entry:  # fmt: skip
    """The step's layers `first` .. `last` as an entry, which gives `scores [B,N,C]`: what the queries of
    `rows` at the last layer make of the token in each slot, as a mean over `kernel` neighbours. Slots that a
    query does not see count as 0, and so does what lies beyond the ends.

    It takes the state of its layers, and `stream [B,T,E]`, what leaves the layer before, where there is one.
    `whole`: the last layer runs to its end and gives `stream` too, and its own token counts as 0; else
    no more of it is computed than the scores need.
    """
    entry, calls = _copied(program, first, last)
    before, call = entry.output_nodes(), calls[-1]
    query, keys, held, stored = _shown(call, last)

    def worth(q: Tensor, k: Tensor, at: Tensor, rows: Tensor, pos: Tensor) -> Tensor:
        index = rows[:, None, :, None].expand(-1, q.shape[1], -1, q.shape[3])
        place, where = at.gather(1, rows)[:, :, None], pos[:, None]
        hidden = (where < 0) | ((where >= place) if whole else (where > place))
        return near(score(q.gather(2, index), k).float().masked_fill(hidden, 0), kernel)

    with entry.graph.inserting_before(entry.graph.find_nodes(op="output")[0]):
        given = (query, keys, entry.input("positions"), entry.input("rows"), held)
        scores = trace(Editor(program, entry.graph), "prune", worth, *given)
    found = {"scores": scores, **({"stream": _item(call, 0)} if whole else {})}
    for name, node in _states(before, calls):
        if whole or node.args[0] is not call or node.args[1] in stored:
            found[name] = node
    return _finished(program, entry, calls, found)


def ending(program: Program, first: int) -> Entry:
    """The step's layers from `first` on, and its head, as an entry that takes `stream [B,T,E]`."""
    entry, calls = _copied(program, first, len(program.facts.layers) - 1)
    before = entry.output_nodes()
    found = {"logits": before["logits"], **dict(_states(before, calls))}
    return _finished(program, entry, calls, found)


def _copied(program: Program, first: int, last: int) -> tuple[Entry, list[fx.Node]]:
    """The step again, graphs of its own over the same parameters, and the calls of these layers, which
    run in any case. The first reads `stream` where others come before it.
    """
    entry = program.copy().step
    calls = layer_calls(program, entry)
    for call in calls:
        _always(call)
    if first:
        into = _item(calls[first - 1], 0)
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


def _item(call: fx.Node, place: int) -> fx.Node:
    """One result of a layer."""
    return next(u for u in call.users if u.args[1] == place)


def _shown(call: fx.Node, layer: int) -> tuple[fx.Node, fx.Node, fx.Node, set[int]]:
    """Let a layer give its queries and keys as well: these, the positions that the keys' slots hold, and
    which of its results the keys are stored in.
    """
    region = call.target
    assert isinstance(region, Region)
    (out,) = region.graph.find_nodes(op="output")
    results = out.args[0]
    assert isinstance(results, tuple)
    attends = next(
        n for n in region.graph.nodes if n.target is attention.default and n.meta.get("layer") == layer
    )
    query, keys, _, _, held = attends.args[:5]
    assert isinstance(query, fx.Node) and isinstance(keys, fx.Node)
    needed = ancestors([keys], set())
    stored = {place for place, node in enumerate(results) if node in needed and place}
    out.args = ((*results, query, keys),)
    call.meta["val"] = (*call.meta["val"], query.meta["val"], keys.meta["val"])
    items = []
    with call.graph.inserting_after(call):
        for place, node in enumerate((query, keys), start=len(results)):
            item = call.graph.call_function(operator.getitem, (call, place))
            item.meta["val"] = node.meta["val"]
            items.append(item)
    holders = list(region.graph.find_nodes(op="placeholder"))
    outer = call.args[holders.index(held)]
    assert isinstance(outer, fx.Node)
    return items[0], items[1], outer, stored


def _states(outputs: dict[str, fx.Node], calls: list[fx.Node]) -> list[tuple[str, fx.Node]]:
    """The state that these layers write, the positions of its slots among it."""
    read = {a for call in calls for a in call.args}
    return [
        (name, node)
        for name, node in outputs.items()
        if name.endswith(".next")
        and (node in read if name.startswith("kv.pos") else node.args and node.args[0] in calls)
    ]


def _finished(
    program: Program, entry: Entry, calls: list[fx.Node], outputs: dict[str, fx.Node]
) -> Entry:
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
            "prefill.prune: deeper layers of this model read the tokens again, not only what the layers "
            "before them give; leave prefill.prune out for it, or use gemfilter"
        )
    return Entry(entry.graph, entry.outputs)


def _shrink(call: fx.Node) -> None:
    """Let a layer give what is read of it, and take what that needs."""
    region = call.target
    assert isinstance(region, Region)
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
