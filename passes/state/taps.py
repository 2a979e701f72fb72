"""Outputs of the step that methods read beside the logits: values of the residual stream."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from accel.ir.errors import PassError, unknown
from accel.ir.invariants import Method
from accel.ir.ops.norm import rms_norm
from accel.ir.ops.rows import take_rows
from accel.ir.program import Editor, Program
from accel.ir.region import layer_calls
from accel.ir.taps import EMBEDS, FINAL, stream
from accel.passes import Pass, Report
from accel.passes.state.head import Head
from accel.passes.state.layers import Layers

aten = torch.ops.aten
_NORMS = (rms_norm.default, aten.layer_norm.default)


@dataclass(frozen=True)
class Taps(Pass):
    """Outputs `[B,T,E]` of the step by their names (`accel.ir.taps`), for all tokens of each call that asks for them.
    Those of keys and values are there already (`KvTaps`).

    readers: the methods that read them; each says which (`Method.taps`).
    """

    readers: tuple[Method, ...]

    after = (Head, Layers)
    stage = -1  # before layers are left out

    def run(self, program: Program) -> Report:
        outputs, names = dict(program.step.output_nodes()), list[str]()
        for reader in self.readers:
            found = _values(program, reader)
            for name in reader.taps(len(program.facts.layers)):
                if name not in found | outputs:
                    raise PassError(
                        f"{reader.full_name}: {unknown('output of the step', name, found)}"
                    )
                outputs[name] = found[name] if name in found else outputs[name]
                names.append(name)
        if FINAL in names:
            outputs[FINAL] = _normed(program, outputs[FINAL])
        program.step.set_outputs(outputs)
        return Report(changed=len(names))


def _values(program: Program, reader: Method) -> dict[str, fx.Node]:
    """What may be read; `final` as it is before the last norm."""
    graph = program.step.graph
    calls = layer_calls(graph)
    if not calls or len(calls) != len(program.facts.layers):
        raise PassError(
            f"{reader.full_name} reads what goes from layer to layer, but {len(calls)} of "
            f"{len(program.facts.layers)} layers were found in the graph; build without it"
        )
    (chosen,) = (n for n in graph.nodes if n.target is take_rows.default)
    first, last = calls[0].args[0], chosen.args[0]
    assert isinstance(first, fx.Node) and isinstance(last, fx.Node)
    found = {EMBEDS: first, FINAL: last}
    for index, call in enumerate(calls):
        (after,) = (user for user in call.users if user.args[1] == 0)
        found[stream(index)] = after
    return found


def _normed(program: Program, value: fx.Node) -> fx.Node:
    """The norm in front of the output head, of all tokens: rows are chosen behind it then, and behind what scales the
    last layer's output before it.
    """
    graph = program.step.graph
    (chosen,) = (n for n in value.users if n.target is take_rows.default)
    chain = _to_norm(chosen)
    if not chain:
        return value
    editor, rows, norm = Editor(program, graph), chosen.args[1], chain[-1]
    chain[0].replace_input_with(chosen, value)
    for node in chain:
        node.meta["val"] = editor.value(node)
    with graph.inserting_after(norm):
        taken = editor.call(take_rows.default, norm, rows)
    norm.replace_all_uses_with(taken, delete_user_cb=lambda user: user is not taken)
    graph.erase_node(chosen)
    return norm


def _to_norm(node: fx.Node) -> list[fx.Node]:
    """What is computed of a value alone up to a norm; none where something else is."""
    chain = list[fx.Node]()
    while len(node.users) == 1:
        (user,) = node.users
        if user.args[0] is not node or user.target not in (*_NORMS, aten.mul.Tensor):
            break
        chain.append(user)
        if user.target in _NORMS:
            return chain
        if not isinstance(user.args[1], fx.Node) or user.args[1].op != "get_attr":
            break
        node = user
    return []
