"""A second entry in onnxruntime-genai's convention: past keys and values in, longer ones out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import fx

from accel.ir.entries.genai import GENAI, past_of, present_of
from accel.ir.ops.attention import attention, operands_of
from accel.ir.ops.kv import kv_append
from accel.ir.ops.rows import take_rows
from accel.ir.program import Editor, Program, State
from accel.ir.region import Conditional, Entry, Region
from accel.ir.state import POSITIONS, CacheRegion, Part
from accel.ir.window import SLOTS
from accel.passes import Pass, Report
from accel.passes.clean.clean import remove_dead
from accel.passes.state.copies import copy_node, copy_region
from accel.passes.state.head import Head
from accel.passes.state.layers import Layers

aten = torch.ops.aten
_PAST, _SEEN = 67, 71  # example sizes while shapes are worked out


@dataclass(frozen=True)
class Concat(Pass):
    """step -> genai(input_ids, attention_mask, position_ids, past_key_values.*) beside it.

    The same layers over the same weights; only the cache differs: `concat(past, new)` in place of
    writing slots, and key positions counted from the attention mask (left padding is 0 there).
    """

    after = (Head, Layers)
    entry = "genai"

    def run(self, program: Program) -> Report:
        states = [s for s in program.state if s.stored and s.region is CacheRegion.RECENT]
        shapes = {tuple("C" if size == SLOTS else size for size in s.shape) for s in states}
        if len(shapes) != 1:
            return Report(refused=["onnxruntime-genai needs equal KV shapes in every layer"])
        parts = [s.part for s in states]
        if parts.count(Part.KEYS) != parts.count(Part.VALUES):
            return Report(
                refused=[
                    "onnxruntime-genai stores keys and values separately, but a latent serves as both"
                ]
            )
        if program.facts.depth is not None:
            return Report(
                refused=["onnxruntime-genai runs all layers and has no input for a layer plan"]
            )
        if any(isinstance(node.target, Conditional) for node in program.step.graph.nodes):
            return Report(
                refused=["onnxruntime-genai has calls of any length, by which this model chooses"]
            )
        if "commit" in program.entries:
            return Report(refused=["onnxruntime-genai does not support draft trees"])
        if program.facts.prefill is not None:
            return Report(refused=["onnxruntime-genai does not prune prompts"])
        if program.facts.both_ways or program.facts.embedding is not None:
            return Report(
                refused=["onnxruntime-genai decodes token by token, which this model does not"]
            )
        if any(layer.shares is not None for layer in program.facts.layers):
            return Report(
                refused=[
                    "onnxruntime-genai needs a cache in every layer, but some layers share one"
                ]
            )
        if any(not s.positions and (s not in states or s.dtype == "int8") for s in program.state):
            return Report(refused=["onnxruntime-genai supports a dense cache only"])
        readers = program.nodes(attention.default, entry=program.step)
        if any(operands_of(node).pages is not None for node in readers):
            return Report(refused=["onnxruntime-genai has no call that chooses pages"])
        graph = fx.Graph()
        copied: dict[fx.Node, fx.Node] = {}
        _inputs(program, graph, copied, states)
        editor = Editor(program, graph)
        for node in program.step.graph.nodes:
            if _has_place(node, copied):
                copied[node] = _copy(editor, node, copied, copied[program.step.input(POSITIONS)])
        places = {s.output for s in program.state if s.positions}
        present = {s.output: present_of(s) for s in states}
        outputs = {
            present.get(name, name): copied[node]
            for name, node in program.step.output_nodes().items()
            if name not in places and node in copied  # what reads slots is for sessions
        }
        graph.output(tuple(outputs.values()))
        remove_dead(graph)
        program.entries[GENAI.name] = Entry(graph, list(outputs), dict(program.step.defaults))
        return Report(changed=1)


def _inputs(
    program: Program, graph: fx.Graph, copied: dict[fx.Node, fx.Node], states: list[State]
) -> None:
    """Placeholders of the entry; positions of slots and `rows` have none and stand for what replaces them."""
    step = program.step
    for old, new in (("tokens", "input_ids"), ("positions", "position_ids")):
        copied[step.input(old)] = graph.placeholder(new)
        copied[step.input(old)].meta["val"] = step.input(old).meta["val"]
    for name in step.defaults:
        copied[step.input(name)] = graph.placeholder(name)
        copied[step.input(name)].meta["val"] = step.input(name).meta["val"]
    editor = Editor(program, graph)
    batch = step.input("tokens").meta["val"].shape[0]
    past = editor.symbol("P", _PAST)
    sizes = {"B": batch, "C": past, SLOTS: past}
    mask = editor.placeholder("attention_mask", (batch, editor.symbol("S", _SEEN)), torch.int64)
    for state in states:
        shape = [sizes[d] if isinstance(d, str) else d for d in state.shape]
        node = editor.placeholder(past_of(state), shape, torch.float32)
        copied[step.input(state.name)] = node
    with graph.inserting_after(graph.find_nodes(op="placeholder")[-1]):
        counted = editor.call(aten.cumsum.default, mask, 1)
    with graph.inserting_after(counted):
        index = editor.call(aten.sub.Tensor, counted, 1)
    with graph.inserting_after(index):
        real = editor.call(aten.gt.Scalar, mask, 0)
    with graph.inserting_after(real):
        positions = editor.call(aten.where.ScalarOther, real, index, -1)
    copied |= {step.input(s.name): positions for s in program.state if s.positions}


def _has_place(node: fx.Node, copied: Mapping[fx.Node, fx.Node]) -> bool:
    """Whether it is copied: what says where new tokens are written is not."""
    if node.op != "call_function":
        return bool(node.op == "get_attr")
    joint = node.target in (kv_append.default, take_rows.default) or isinstance(node.target, Region)
    return joint or all(n in copied for n in node.all_input_nodes)


def _copy(
    editor: Editor, node: fx.Node, copied: dict[fx.Node, fx.Node], key_positions: fx.Node
) -> fx.Node:
    """One node of the step entry, or of a layer, in the new convention."""
    if node.target is kv_append.default:
        past = copied.get(node.args[0])  # type: ignore[arg-type]
        if past is None or past is key_positions:
            return key_positions
        return editor.call(aten.cat.default, [past, copied[node.args[1]]], 2)  # type: ignore[index]
    if node.target is take_rows.default:
        return copied[node.args[0]]  # type: ignore[index]
    if isinstance(node.target, Region):
        again = partial(_copy, key_positions=key_positions)
        return copy_region(editor, node, copied, again)
    return copy_node(editor, node, copied)
