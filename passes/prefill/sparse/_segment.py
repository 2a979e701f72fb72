"""The joint: an entry `sparse`, the step for one segment of a prompt whose keys are gathered first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, fx

from accel.ir.entries.compress import queries_of
from accel.ir.errors import PassError
from accel.ir.ops.attention import attention, operands_of
from accel.ir.ops.kv import kv_append
from accel.ir.ops.op import operand_of
from accel.ir.program import Editor, Program
from accel.ir.region import Entry, Region
from accel.ir.state import POSITIONS, Part
from accel.ir.trace import Renamed, trace
from accel.passes.prefill._entry import added, copied, finished, states

_SLOTS = 59  # example number of slots, beyond those of the blocks
_NEVER = torch.finfo(torch.float32).min


class Method(Protocol):
    """What the joint asks of a method (`accel.passes.prefill.sparse.Base`)."""

    @property
    def block(self) -> int: ...
    @property
    def budget(self) -> int: ...
    @property
    def first(self) -> int: ...

    def score(self, queries: Tensor, high: Tensor, low: Tensor, scale: float) -> Tensor: ...
    def fuse(self, weights: Tensor, before: Tensor) -> Tensor: ...


def sparse_entry(program: Program, method: Method) -> tuple[Entry, int]:
    """The step's inputs and state -> its state, and `queries.<layer>` where the step gives them; no
    logits. In how many layers attention reads what the method chooses.

    All real tokens of a row are one segment from slot `slots [B]` on, before which lie whole blocks of
    `block` slots, and enough of them to choose from.
    """
    _check(program)
    entry, calls = copied(program, 0, len(program.facts.layers) - 1)
    _enlarge(program, entry, 3 * method.budget + _SLOTS)
    before: fx.Node | None = None
    count = 0
    for layer, call in enumerate(calls):
        region = call.target
        assert isinstance(region, Region)
        node = next((n for n in region.graph.nodes if n.target is attention.default), None)
        if node is not None and layer >= method.first and operands_of(node).mask == "causal":
            before = _gathered(program, method, call, node, before)
            count += 1
    if not count:
        raise PassError(
            f"prefill.sparse: no layer from {method.first} on attends to all tokens before it; leave it out "
            "for this model, or set an earlier first"
        )
    asked = {queries_of(layer) for layer in range(len(calls))}
    found = {n: v for n, v in entry.output_nodes().items() if n in asked}
    return finished(entry, calls, {**found, **dict(states(program, entry, calls))}), count


def _enlarge(program: Program, entry: Entry, example: int) -> None:
    """Let the number of slots be one of which the example has enough blocks to choose from."""
    editor, held = Editor(program, entry.graph), entry.input(POSITIONS).meta["val"]
    slots = editor.symbol("C", example)
    with editor.fake:
        wide = torch.empty((held.shape[0], slots), dtype=held.dtype)
    renamed = Renamed(editor, [held], [wide])
    for graph in program.graphs(entry):
        for node in graph.nodes:
            if "val" in node.meta:
                node.meta["val"] = renamed(node.meta["val"])


def _check(program: Program) -> None:
    """Raise PassError where a prompt cannot be read so."""
    facts = program.facts
    if facts.encoder is not None:
        reason = "the prompt of an encoder-decoder is the start of the decoder's output"
    elif any(s.part is Part.RECURRENT for s in program.state):
        reason = "a rewind recomputes recurrent state from the tokens and reads all keys"
    elif any(layer.shares is not None for layer in facts.layers):
        reason = "layers of this model read keys of other layers"
    elif any(
        operands_of(n).bias is not None
        for n in program.nodes(attention.default, entry=program.step)
    ):
        reason = "gathered keys have no position bias (ALiBi, T5)"
    else:
        return
    raise PassError(f"prefill.sparse: {reason}; leave one of the two out")


def _gathered(
    program: Program,
    method: Method,
    call: fx.Node,
    node: fx.Node,
    before: fx.Node | None,
) -> fx.Node:
    """Let a layer's attention read the blocks that it chooses and its own tokens; gives the weights that
    it chose them by.
    """
    region = call.target
    assert isinstance(region, Region)
    x = operands_of(node)
    stored = next(n for n in region.graph.nodes if n.target is kv_append.default)
    operands = [x.q, x.k, x.k_pos, operand_of(stored, "slots"), *([] if x.v is x.k else [x.v])]
    if before is not None and str(before.meta["val"].shape[1]) == str(x.k.meta["val"].shape[1]):
        with region.graph.inserting_after(region.graph.find_nodes(op="placeholder")[-1]):
            holder = region.graph.placeholder("weights")
        holder.meta["val"] = before.meta["val"]
        call.args = (*call.args, before)
        operands.append(holder)
    pick = gather(method, x.scale, x.v is x.k)
    with region.graph.inserting_before(node):
        editor = Editor(program, region.graph)
        key = ("sparse", method, x.scale, x.v is x.k)
        found = trace(editor, region.name, pick, *operands, like=node, key=key)
    old = found["old"], found.get("old_v", found["old"])
    own = found["own"], found.get("own_v", found["own"])
    form = x.bias, x.scale, x.softcap, x.mask, x.window
    node.args = (x.q, *own, x.q_pos, found["own_pos"], *form)
    kept = {"kept_k": old[0], "kept_v": old[1], "kept_pos": found["old_pos"]}
    node.kwargs = {**({} if x.sink is None else {"sink": x.sink}), **kept}
    return added(call, found["weights"])


def gather(method: Method, scale: float, shared: bool) -> Callable[..., dict[str, Tensor]]:
    """A function of queries [B,H,T,D], keys [B,G,C,D], their positions [B,C], the first own slot [B], values
    (unless they are `shared` with the keys) and, from the second layer on, the weights of the one before:
    the keys, values and positions of the chosen blocks [B,G,M,…] and of the segment itself [B,G,T,…].
    """
    size = method.block

    def pick(q: Tensor, k: Tensor, pos: Tensor, first: Tensor, *more: Tensor) -> dict[str, Tensor]:
        values, more = (k, more) if shared else (more[0], more[1:])
        groups, width = k.shape[1], k.shape[3]
        blocks = k.shape[2] // size
        cut = k[:, :, : blocks * size].reshape(k.shape[0], groups, blocks, size, width)
        number = torch.arange(blocks, device=k.device)
        past = ((number + 1) * size)[None] <= first[:, None]  # [B,NB]
        scores = method.score(q, cut.amax(3), cut.amin(3), scale).float()
        scores = torch.nan_to_num(scores, nan=_NEVER).masked_fill(~past[:, None], _NEVER)
        weights = scores.softmax(-1)
        if more:
            weights = method.fuse(weights, more[0])
        ranked = weights.masked_fill(~past[:, None], -1.0)
        chosen = ranked.topk(method.budget // size, dim=2).indices  # [B,G,K]
        inside = torch.arange(size, device=k.device)
        slots = (chosen[..., None] * size + inside).flatten(2)  # [B,G,M]
        old_pos = pos[:, None].expand(-1, groups, -1).gather(2, slots)
        own = first[:, None] + torch.arange(q.shape[2], device=k.device)  # [B,T]
        found = {
            "weights": weights,
            "old_pos": old_pos.masked_fill(slots >= first[:, None, None], -1),
            "own_pos": pos.gather(1, own),
            "old": taken(k, slots),
            "own": taken(k, own[:, None].expand(-1, groups, -1)),
        }
        if not shared:
            found["old_v"] = taken(values, slots)
            found["own_v"] = taken(values, own[:, None].expand(-1, groups, -1))
        return found

    return pick


def taken(x: Tensor, slots: Tensor) -> Tensor:
    """Rows of x [B,G,C,D] in these slots [B,G,M]."""
    return x.gather(2, slots[..., None].expand(-1, -1, -1, x.shape[3]))
