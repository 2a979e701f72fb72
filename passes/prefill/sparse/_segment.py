"""The joint: an entry `sparse`, the step for one segment of a prompt whose keys are gathered first."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import ClassVar, Protocol

import torch
from torch import Tensor, fx

from accel.ir.errors import PassError
from accel.ir.ops.attention import Form, attention, form_of, operands_of
from accel.ir.ops.kv import kv_append
from accel.ir.ops.op import operand_of
from accel.ir.program import Editor, Program
from accel.ir.region import Entry, Region
from accel.ir.state import POSITIONS, Part
from accel.ir.trace import Renamed, trace
from accel.passes.prefill._entry import added, copied, finished, observed, states
from accel.passes.prefill.sparse._inputs import LOWEST, Inputs, last_logits, probabilities

_SLOTS = 59  # example number of slots, beyond those of the blocks


class Method(Protocol):
    """What the joint asks of a method (`accel.passes.prefill.sparse.Base`)."""

    fuses: ClassVar[bool]
    orders: ClassVar[bool]
    score: Callable[..., Tensor]
    order: Callable[..., Tensor]
    score_columns: Callable[..., Tensor]

    @property
    def segment(self) -> int: ...
    @property
    def block(self) -> int: ...
    @property
    def budget(self) -> int: ...
    @property
    def first(self) -> int: ...
    @property
    def observe(self) -> int: ...
    @property
    def columns(self) -> int: ...

    def summary(self, blocks: Tensor) -> dict[str, Tensor]: ...
    def fuse(self, weights: Tensor, before: Tensor) -> Tensor: ...


def sparse_entry(
    program: Program, method: Method, layer_methods: Mapping[int, Method]
) -> tuple[Entry, int]:
    """The step's inputs and state -> its state, and `queries.<layer>` where the step gives them; no
    logits. In how many layers attention reads what the method, or the layer's `layer_methods`, chooses.

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
            before = _gathered(program, layer_methods.get(layer, method), call, node, before)
            count += 1
    if not count:
        raise PassError(
            f"prefill.sparse: no layer from {method.first} on attends to all tokens before it; leave it out "
            "for this model, or set an earlier first"
        )
    found = observed(entry, 0, len(calls) - 1)
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
) -> fx.Node | None:
    """Let a layer's attention read what it chooses and its own tokens; gives the weights that it chose blocks
    by, where the next layer reads them.
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
    if x.sink is not None:
        operands.append(x.sink)
    own_form, has_sink = form_of(x), x.sink is not None
    pick = gather(method, own_form, x.v is x.k, has_sink)
    with region.graph.inserting_before(node):
        editor = Editor(program, region.graph)
        key = ("sparse", method, own_form, x.v is x.k, has_sink)
        found = trace(editor, region.name, pick, *operands, like=node, key=key)
    old = found["old"], found.get("old_v", found["old"])
    own = found["own"], found.get("own_v", found["own"])
    form = x.bias, x.scale, x.softcap, x.mask, x.window
    node.args = (x.q, *own, x.q_pos, found["own_pos"], *form)
    kept = {"kept_k": old[0], "kept_v": old[1], "kept_pos": found["old_pos"]}
    node.kwargs = {**({} if x.sink is None else {"sink": x.sink}), **kept}
    return added(call, found["weights"]) if method.fuses else None


def gather(
    method: Method, form: Form, shared: bool, sink: bool = False
) -> Callable[..., dict[str, Tensor]]:
    """A function of queries [B,H,T,D], keys [B,G,C,D], their positions [B,C], the first own slot [B], values
    (unless they are `shared` with the keys), from the second layer on the weights of the one before, and the layer's
    `sink` [H], if any: the keys, values and positions of the chosen slots [B,G,M,…] and of the segment itself
    [B,G,T,…].
    """

    def pick(q: Tensor, k: Tensor, pos: Tensor, first: Tensor, *more: Tensor) -> dict[str, Tensor]:
        values, more = (k, more) if shared else (more[0], more[1:])
        groups = k.shape[1]
        whole = replace(form, sink=more[-1]) if sink else form
        slots, weights = chosen(method, q, k, pos, first, whole, *(more[:-1] if sink else more))
        old_pos = pos[:, None].expand(-1, groups, -1).gather(2, slots.clamp(min=0))
        own = first[:, None] + torch.arange(q.shape[2], device=k.device)  # [B,T]
        hidden = (slots < 0) | (slots >= first[:, None, None])
        found = {
            "old_pos": old_pos.masked_fill(hidden, -1),
            "own_pos": pos.gather(1, own),
            "old": taken(k, slots.clamp(min=0)),
            "own": taken(k, own[:, None].expand(-1, groups, -1)),
        }
        if method.fuses:
            found["weights"] = weights
        if not shared:
            found["old_v"] = taken(values, slots.clamp(min=0))
            found["own_v"] = taken(values, own[:, None].expand(-1, groups, -1))
        return found

    return pick


def chosen(
    method: Method, q: Tensor, k: Tensor, pos: Tensor, first: Tensor, form: Form, *before: Tensor
) -> tuple[Tensor, Tensor]:
    """The slots that a segment reads before its own, [B,G,M] (-1: nothing), and the weights or scores of blocks
    [B,G,NB] that they were chosen by.
    """
    size, groups, width = method.block, k.shape[1], k.shape[3]
    inputs = Inputs({"queries": q, "keys": k, "first": first, "form": form})
    inputs.add(
        {"logits": lambda: last_logits(q, k, pos, first, method.observe, form)}
        | {"attention": lambda: probabilities(inputs["logits"], form)}
        | {"earlier": lambda: torch.arange(k.shape[2], device=k.device) < first[:, None]}
    )
    order = None  # the slot of each key in the order of blocks [B,G,S]; None: its number
    blocks = k.shape[2] // size
    if method.orders:
        blocks = k.shape[2] // method.segment * (method.segment // size)
        order = _ordered(inputs.call(method.order), method.segment)
        inputs.add({"slots": order})
    keys = k[:, :, : blocks * size] if order is None else taken(k, order)
    inputs.add(method.summary(keys.reshape(k.shape[0], groups, blocks, size, width)))
    number = torch.arange(blocks, device=k.device)
    past = ((number + 1) * size)[None] <= first[:, None]  # [B,NB]
    inputs.add({"past": past})
    scores = inputs.call(method.score).float()
    left_out = (scores == -torch.inf) | ~past[:, None]
    weights = torch.nan_to_num(scores, nan=LOWEST).masked_fill(~past[:, None], LOWEST)
    if method.fuses:
        weights = weights.softmax(-1)
        if before:
            weights = method.fuse(weights, before[0])
    ranked = weights.masked_fill(~past[:, None], -1.0 if method.fuses else -torch.inf)
    best = ranked.topk((method.budget - method.columns) // size, dim=2).indices  # [B,G,K]
    inside = torch.arange(size, device=k.device)
    slots = (best[..., None] * size + inside).flatten(2)  # [B,G,M]
    if order is not None:
        slots = order.gather(2, slots)
    unread = left_out.gather(2, best)[..., None].expand(-1, -1, -1, size).flatten(2)
    slots = slots.masked_fill(unread, -1)
    if method.columns:
        slots = torch.cat((slots, _columns(method, inputs, slots)), 2)
    return slots, weights


def _ordered(scores: Tensor, segment: int) -> Tensor:
    """Slots [B,G,S] by falling scores [B,G,C] within each whole segment."""
    segments = scores.shape[2] // segment
    cut = torch.nan_to_num(scores[:, :, : segments * segment], nan=LOWEST)
    order = cut.unflatten(2, (segments, segment)).argsort(dim=-1, descending=True, stable=True)
    start = torch.arange(segments, device=scores.device)[:, None] * segment
    slots: Tensor = (order + start).flatten(2)
    return slots


def _columns(method: Method, inputs: Inputs, slots: Tensor) -> Tensor:
    """The best earlier slots beside these, [B,G,K] (-1: nothing)."""
    scores = inputs.call(method.score_columns).float()
    scores = torch.nan_to_num(scores, nan=LOWEST, neginf=-torch.inf)
    scores = scores.masked_fill(~inputs["earlier"][:, None], -torch.inf)
    beyond = scores.shape[2]  # one more slot, for what is not read
    read = torch.zeros_like(torch.nn.functional.pad(scores, (0, 1)))
    read = read.scatter(2, slots.masked_fill(slots < 0, beyond), torch.ones_like(slots).float())
    scores = scores.masked_fill(read[..., :beyond] > 0, -torch.inf)
    best = scores.topk(method.columns, dim=2)
    return best.indices.masked_fill(best.values == -torch.inf, -1)


def taken(x: Tensor, slots: Tensor) -> Tensor:
    """Rows of x [B,G,C,D] in these slots [B,G,M]; whole rows are copied, by their number in a table of all."""
    batch, groups, count, width = x.shape
    start = torch.arange(batch * groups, device=x.device).reshape(batch, groups, 1) * count
    rows: Tensor = x.reshape(batch * groups * count, width)[slots + start]
    return rows
