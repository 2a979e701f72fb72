"""Outputs of the step that methods read beside the logits: keys and values."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from accel.ir.errors import PassError
from accel.ir.invariants import Method
from accel.ir.ops.attention import attention
from accel.ir.ops.kv import kv_append
from accel.ir.ops.op import operand_of
from accel.ir.program import Editor, Program
from accel.ir.region import sizes
from accel.ir.state import Part
from accel.ir.taps import keys, last_keys, last_own, last_values, values
from accel.passes import Pass, Report
from accel.passes.state.cache import Cache

aten = torch.ops.aten


@dataclass(frozen=True)
class KvTaps(Pass):
    """Outputs `[B,T,GD]` of the step by their names (`accel.ir.taps`): what lies in a layer's cache of keys or values
    in the slots that the call filled, for all tokens of each call that asks for them.

    readers: as of `Taps`, which rely on a cache of keys as they are. A layer is refused that has no keys and values of
    its own, of equal width.
    """

    readers: tuple[Method, ...]

    after = (Cache,)
    flat = True
    stage = -2  # before layers are left out

    def run(self, program: Program) -> Report:
        outputs, count = dict(program.step.output_nodes()), 0
        layers = len(program.facts.layers)
        for reader in self.readers:
            for name in reader.taps(layers):
                layer, part = _place(program, name)
                if layer is None or name in outputs:
                    continue
                outputs[name] = _beside(program, reader, layer, part)
                count += 1
        program.step.set_outputs(outputs)
        return Report(changed=count)


def _place(program: Program, name: str) -> tuple[int | None, Part]:
    """The layer of a name, and what of it; None: it is of another output, or of no layer."""
    facts = program.facts.layers
    for i in range(len(facts)):
        if name in (keys(i), values(i)):
            return i, Part.KEYS if name == keys(i) else Part.VALUES
    windows, shares = [one.window for one in facts], [one.shares for one in facts]
    for window in (False, True):
        if name in (last_keys(window), last_values(window)):
            part = Part.KEYS if name == last_keys(window) else Part.VALUES
            return last_own(windows, shares, window), part
    return None, Part.KEYS


def _beside(program: Program, reader: Method, layer: int, part: Part) -> fx.Node:
    """Of the slots of a call what lies in a layer's cache, all KV heads side by side. Raises PassError."""
    sites = [
        n
        for n in program.nodes(attention.default, entry=program.step)
        if n.meta.get("layer") == layer
    ]
    stored = [operand_of(site, one) for site in sites for one in (Part.KEYS, Part.VALUES)]
    why = "" if len(sites) == 1 else f"it attends {len(sites)} times"
    if program.facts.layers[layer].shares is not None:
        why = f"it reads those of layer {program.facts.layers[layer].shares}"
    elif stored and (stored[0] is stored[1] or _size(stored[0]) != _size(stored[1])):
        why = "it has a latent, or values of another width"
    if why:
        raise PassError(
            f"{reader.full_name} reads the keys and values of layer {layer}, but {why}; use another drafter"
        )
    append = operand_of(sites[0], part)
    assert isinstance(append, fx.Node) and append.target is kv_append.default
    groups, width = _size(append)
    graph, step = append.graph, program.step
    (end,) = graph.find_nodes(op="output")
    with graph.inserting_before(end):  # outside of the layer, which is computed as without it
        editor = Editor(program, graph)
        length = editor.call(aten.sym_size.int, step.input("tokens"), 1)
        first = editor.call(aten.unsqueeze.default, step.input("slots"), 1)
        index = editor.call(aten.add.Tensor, first, editor.call(aten.arange.default, length))
        for axis in (1, 3):
            index = editor.call(aten.unsqueeze.default, index, axis)
        index = editor.call(aten.expand.default, index, [-1, groups, -1, width])
        rows = editor.call(aten.gather.default, append, 2, index)
        rows = editor.call(aten.transpose.int, rows, 1, 2)
        return editor.call(aten.flatten.using_ints, rows, 2, 3)


def _size(node: object) -> list[int]:
    """The KV heads of a buffer, and their width."""
    assert isinstance(node, fx.Node)
    return [int(sizes(node)[i]) for i in (1, 3)]
