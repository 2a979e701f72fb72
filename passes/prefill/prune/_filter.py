"""The joint of methods that look before the model runs: an entry `filter`, the step up to the layer that
says what a prompt's tokens are worth.
"""

from __future__ import annotations

import operator
from collections.abc import Callable

from torch import Tensor, fx

from accel.ir.ops.attention import attention
from accel.ir.program import Conditional, Editor, Entry, Program, Region, ancestors
from accel.ir.trace import trace
from accel.passes.clean.clean import remove_dead
from accel.passes.prefill.prune._layer import layer_calls, near

Scores = Callable[[Tensor, Tensor], Tensor]  # queries [B,H,N,D], keys [B,G,S,D] -> [B,N,S]
_INPUTS = ("tokens", "positions", "slots", "rows")


def add_filter(program: Program, layer: int, score: Scores, kernel: int) -> None:
    """An entry of the step's inputs, and of the state of the layers up to `layer`, which gives `scores
    [B,N,C]`: what the queries of `rows` there make of the token in each slot, as a mean over `kernel`
    neighbours. Slots that a query does not see count as 0, and so does what lies beyond the ends.
    """
    entry = program.copy().step  # graphs of its own over the same parameters
    graph, before = entry.graph, entry.output_nodes()
    calls = layer_calls(program, entry)[: layer + 1]
    for call in calls:
        _always(call)
    query, keys, written = _opened(calls[-1], layer, before)

    def worth(q: Tensor, k: Tensor, at: Tensor, rows: Tensor, held: Tensor) -> Tensor:
        index = rows[:, None, :, None].expand(-1, q.shape[1], -1, q.shape[3])
        hidden = (held < 0)[:, None] | (held[:, None] > at.gather(1, rows)[:, :, None])
        return near(score(q.gather(2, index), k).float().masked_fill(hidden, 0), kernel)

    with graph.inserting_before(graph.find_nodes(op="output")[0]):
        given = (query, keys, entry.input("positions"), entry.input("rows"), before["kv.pos.next"])
        scores = trace(Editor(program, graph), "filter", worth, *given)
    held = {n: v for n, v in before.items() if v.target is operator.getitem and v.args[0] in calls[:-1]}
    states = {"kv.pos.next": before["kv.pos.next"], **held, **written}
    entry.set_outputs({"scores": scores} | {n: v for n, v in states.items() if n.endswith(".next")})
    for call in reversed(calls):
        remove_dead(graph)
        _shrink(call)
    remove_dead(graph)
    for holder in graph.find_nodes(op="placeholder"):
        if not holder.users and holder.target not in _INPUTS:
            graph.erase_node(holder)
    program.entries["filter"] = Entry(graph, entry.outputs)


def _always(call: fx.Node) -> None:
    """A layer under a condition becomes one that runs."""
    region = call.target
    if isinstance(region, Conditional):
        first = next(iter(region.graph.find_nodes(op="placeholder")))
        region.graph.erase_node(first)
        call.target, call.args = Region(region.name, region.graph), call.args[1:]


def _opened(
    call: fx.Node, layer: int, outputs: dict[str, fx.Node]
) -> tuple[fx.Node, fx.Node, dict[str, fx.Node]]:
    """Let a layer give its queries and keys, and the state that these are stored in, and do no more."""
    region = call.target
    assert isinstance(region, Region)
    (out,) = region.graph.find_nodes(op="output")
    results = out.args[0]
    assert isinstance(results, tuple)
    attends = next(
        n for n in region.graph.nodes if n.target is attention.default and n.meta.get("layer") == layer
    )
    query, keys = attends.args[:2]
    assert isinstance(query, fx.Node) and isinstance(keys, fx.Node)
    needed = ancestors([keys], set())
    names: dict[int, str] = {}
    for name, item in outputs.items():
        if item.target is operator.getitem and item.args[0] is call:
            place = item.args[1]
            assert isinstance(place, int)
            if results[place] in needed:
                names[place] = name
    found = [query, keys, *(results[i] for i in names)]
    out.args = (tuple(found),)
    call.meta["val"] = tuple(n.meta["val"] for n in found)
    items = []
    with call.graph.inserting_after(call):
        for place, node in enumerate(found):
            item = call.graph.call_function(operator.getitem, (call, place))
            item.meta["val"] = node.meta["val"]
            items.append(item)
    return items[0], items[1], dict(zip(names.values(), items[2:], strict=True))


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
