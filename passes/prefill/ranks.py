"""The joint of ranks that share a prompt: the step cut at each attention, and attention alone."""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from accel.ir.entries.attend import form_of
from accel.ir.entries.rank import between
from accel.ir.errors import PassError
from accel.ir.ops.attention import attention, operands_of, partial_attention
from accel.ir.ops.kv import kv_append
from accel.ir.ops.op import operand_of
from accel.ir.prefill import Prefill
from accel.ir.prefill import Ranks as Forms
from accel.ir.program import Editor, Program
from accel.ir.region import Entry, Region
from accel.ir.state import Part
from accel.ir.trace import trace
from accel.passes import Pass, Report
from accel.passes.entry_inputs import EntryInputs
from accel.passes.fuse.residual import Residual
from accel.passes.prefill._entry import added, copied, finished, layer_calls, result
from accel.passes.state.layers import Layers

_QUERIES, _KEYS = 53, 61  # example sizes while shapes are worked out
_WHERE = "leave prefill.ranks out for this model"


@dataclass(frozen=True)
class Ranks(Pass):
    """-> the entries `rank.0` .. `rank.L`: rank.i takes `attended [B,H,T,Dv]`, the attention of layer i-1, and
    `stream [B,T,E]`, what went into that layer (i = 0: `tokens`; i = 1: `tokens` in place of `stream`). It gives `q
    [B,H,T,D]`, `k [B,G,T,D]` and `v` of layer i and its `stream_out` (i > 0); the last one gives logits.
    `attend.<n>` gives `out [B,H,T,Dv]` and `lse [B,H,T]` of queries over keys at the positions `q_pos [B,T]` and
    `k_pos [B,S]` (-1: nothing there). A sink, one more key for all queries, is none of these keys: rank.i
    takes `lse`, too, and adds it.

    They have no state, so keys may lie anywhere. The step is unchanged.
    """

    after = (Layers, Residual)
    stage = 3  # after methods that change the step
    must_change = True

    def run(self, program: Program) -> Report:
        """Raises PassError where the model cannot be cut so."""
        count = len(layer_calls(program, program.step))
        sites = [_attention(call) for call in layer_calls(program, program.step)]
        _check(program, sites)
        forms: dict[Any, int] = {}
        chosen = []
        for node in sites:
            form = _form(node)
            if form not in forms:
                program.entries[form_of(len(forms))] = _attend(program, node)
                forms[form] = len(forms)
            chosen.append(forms[form])
        for number in range(count + 1):
            program.entries[between(number)] = _between(program, number, count)
        found = program.facts.prefill or Prefill()
        program.facts.prefill = replace(found, ranks=Forms(tuple(chosen)))
        return Report(changed=count)


def _attention(call: fx.Node) -> fx.Node:
    """The only attention of a layer. Raises PassError."""
    region = call.target
    assert isinstance(region, Region)
    found = [n for n in region.graph.nodes if n.target is attention.default]
    if len(found) != 1:
        raise PassError(
            f"prefill.ranks: {region.name} has {len(found)} attentions, not 1; {_WHERE}"
        )
    node: fx.Node = found[0]
    return node


def _new(node: Any) -> fx.Node | None:
    """What a call appends to the keys or values that attention reads."""
    if isinstance(node, fx.Node) and node.target is kv_append.default:
        new = operand_of(node, "new")
        assert isinstance(new, fx.Node)
        return new
    return None


def _check(program: Program, sites: list[fx.Node]) -> None:
    """Raise PassError where keys of a token are not all that later ones need of it."""
    for node in sites:
        x = operands_of(node)
        where = f"layer {node.meta.get('layer')}"
        if _new(x.k) is None or _new(x.v) is None:
            raise PassError(
                f"prefill.ranks: {where} reads keys or values of another layer, or not as a call appends them; {_WHERE}"
            )
        if x.kept_k is not None or x.pages is not None or x.beside is not None:
            raise PassError(f"prefill.ranks: {where} reads more than its cache; {_WHERE}")
        if x.bias is not None and x.bias.op != "get_attr":
            raise PassError(f"prefill.ranks: {where} computes its bias; {_WHERE}")
        if x.mask == "full":
            raise PassError(
                f"prefill.ranks: {where} sees later tokens, and ranks go by causal order; {_WHERE}"
            )
    plain = (Part.KEYS, Part.VALUES, Part.POSITIONS)
    if other := [
        s.name for s in program.state if s.part not in plain or not s.name.startswith("kv.")
    ]:
        raise PassError(f"prefill.ranks: '{other[0]}' is no cache of keys and values; {_WHERE}")


def _form(node: fx.Node) -> Any:
    """What makes two attentions one form."""
    x = operands_of(node)
    shapes = [tuple(n.meta["val"].shape[axis] for axis in (1, 3)) for n in (x.q, x.k, x.v)]
    bias = None if x.bias is None else x.bias.target
    return (*shapes, x.v is x.k, bias, x.scale, x.softcap, x.mask, x.window)


def _attend(program: Program, node: fx.Node) -> Entry:
    """Partial attention of this form, as an entry."""
    x = operands_of(node)
    graph = fx.Graph()
    inputs = EntryInputs(program, graph)
    queries, keys = (inputs.source.symbol(n, size) for n, size in (("T", _QUERIES), ("S", _KEYS)))

    def heads(name: str, like: fx.Node, tokens: Any) -> fx.Node:
        _, count, _, width = like.meta["val"].shape
        return inputs.new(name, inputs.batch, count, tokens, width, dtype=torch.float32)

    q, k = heads("q", x.q, queries), heads("k", x.k, keys)
    v = k if x.v is x.k else heads("v", x.v, keys)
    q_pos, k_pos = (
        inputs.new("q_pos", inputs.batch, queries),
        inputs.new("k_pos", inputs.batch, keys),
    )
    editor = Editor(program, graph)
    bias = None if x.bias is None else editor.param(str(x.bias.target))
    form = bias, x.scale, x.softcap, x.mask, x.window
    both = editor.call(partial_attention.default, q, k, v, q_pos, k_pos, *form)
    out, lse = (editor.call(operator.getitem, both, place) for place in (0, 1))
    graph.output((out, lse))
    return Entry(graph, ["out", "lse"])


def _between(program: Program, number: int, count: int) -> Entry:
    """The entry `rank.<number>` of a model of `count` layers."""
    entry, calls = copied(program, max(0, number - 1), min(number, count - 1))
    found: dict[str, fx.Node] = {}
    if number:
        _given(program, entry, calls[0])
        if number < count:
            found["stream_out"] = result(calls[0], 0)
    if number < count:
        x = operands_of(_attention(calls[-1]))
        for name, value in (("q", x.q), ("k", _new(x.k)), ("v", _new(x.v))):
            assert isinstance(value, fx.Node)  # `_check`
            if name != "v" or x.v is not x.k:
                found[name] = added(calls[-1], value)
    else:
        found["logits"] = entry.output_nodes()["logits"]
    return finished(entry, calls, found)


def _given(program: Program, entry: Entry, call: fx.Node) -> None:
    """Let a layer take its attention as an input."""
    region, node = call.target, _attention(call)
    assert isinstance(region, Region)
    value = node.meta["val"]
    outer = Editor(program, entry.graph).placeholder("attended", value.shape, value.dtype)
    with region.graph.inserting_after(region.graph.find_nodes(op="placeholder")[-1]):
        inner = region.graph.placeholder("attended")
    inner.meta["val"] = outer.meta["val"]
    call.args = (*call.args, outer)
    node.replace_all_uses_with(inner)
    if (sink := operands_of(node).sink) is not None:
        _beside(program, entry, call, inner, sink)


def _beside(
    program: Program, entry: Entry, call: fx.Node, attended: fx.Node, sink: fx.Node
) -> None:
    """Let the result of a layer's attention be as if there were one more key of score `sink [H]`, whose value is 0."""
    region, readers = call.target, list(attended.users)
    assert isinstance(region, Region)
    value = attended.meta["val"]
    outer = Editor(program, entry.graph).placeholder("lse", value.shape[:3], value.dtype)
    with region.graph.inserting_after(region.graph.find_nodes(op="placeholder")[-1]):
        lse = region.graph.placeholder("lse")
    lse.meta["val"] = outer.meta["val"]
    call.args = (*call.args, outer)

    def share(out: Tensor, total: Tensor, score: Tensor) -> Tensor:
        return out * torch.sigmoid(total - score[:, None])[..., None]

    with region.graph.inserting_before(min(readers)):
        held = sink if sink < min(readers) else region.graph.node_copy(sink)
        less = trace(
            Editor(program, region.graph), f"{region.name}.sink", share, attended, lse, held
        )
    for reader in readers:
        reader.replace_input_with(attended, less)
