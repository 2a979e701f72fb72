"""The joint: parts of the step as entries of their own, up to a layer that says what a prompt's tokens are worth."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, fx

from accel.ir.ops.attention import attention, operands_of
from accel.ir.program import Editor, Program, ancestors
from accel.ir.region import Entry, Region
from accel.ir.trace import trace
from accel.passes.prefill._entry import added, copied, finished, result, states
from accel.passes.prefill.prune._layer import near


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
    entry, calls = copied(program, first, last)
    written, call = states(program, entry, calls), calls[-1]
    query, keys, held, stored = _shown(call, last)

    def worth(q: Tensor, k: Tensor, at: Tensor, rows: Tensor, pos: Tensor) -> Tensor:
        index = rows[:, None, :, None].expand(-1, q.shape[1], -1, q.shape[3])
        place, where = at.gather(1, rows)[:, :, None], pos[:, None]
        hidden = (where < 0) | ((where >= place) if whole else (where > place))
        return near(score(q.gather(2, index), k).float().masked_fill(hidden, 0), kernel)

    with entry.graph.inserting_before(entry.graph.find_nodes(op="output")[0]):
        given = (query, keys, entry.input("positions"), entry.input("rows"), held)
        scores = trace(Editor(program, entry.graph), "prune", worth, *given)
    found = {"scores": scores, **({"stream": result(call, 0)} if whole else {})}
    for name, node in written:
        if whole or node.args[0] is not call or node.args[1] in stored:
            found[name] = node
    return finished(entry, calls, found)


def ending(program: Program, first: int) -> Entry:
    """The step's layers from `first` on, and its head, as an entry that takes `stream [B,T,E]`."""
    entry, calls = copied(program, first, len(program.facts.layers) - 1)
    before = entry.output_nodes()
    found = {"logits": before["logits"], **dict(states(program, entry, calls))}
    return finished(entry, calls, found)


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
        n
        for n in region.graph.nodes
        if n.target is attention.default and n.meta.get("layer") == layer
    )
    x = operands_of(attends)
    query, keys, held = x.q, x.k, x.k_pos
    needed = ancestors([keys], set())
    stored = {place for place, node in enumerate(results) if node in needed and place}
    items = [added(call, node) for node in (query, keys)]
    holders = list(region.graph.find_nodes(op="placeholder"))
    outer = call.args[holders.index(held)]
    assert isinstance(outer, fx.Node)
    return items[0], items[1], outer, stored
