"""Logits only where they are asked for."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, fx

from accel.ir.ops.rows import take_rows
from accel.ir.program import Editor, Program
from accel.ir.weights import Stored
from accel.passes import Pass, Report
from accel.passes.recognise.region import Kinds
from accel.passes.state.cache import Cache

aten = torch.ops.aten
# One token in, one token out, whatever the number of tokens: rows may be chosen before these.
_PER_TOKEN = {
    getattr(aten, n)
    for n in "linear mul div add sub tanh neg layer_norm gelu silu relu _to_copy to clamp".split()
} | {torch.ops.accel.rms_norm}
_ROWS = 61  # example number of rows while shapes are worked out


@dataclass(frozen=True)
class Head(Pass):
    """Choose `rows [B,N]` of the tokens before the final norm and the output head, not after, and behind a number that
    scales the last layer.
    """

    after = (Cache,)
    must_change = True

    def run(self, program: Program) -> Report:
        step, graph = program.step, program.step.graph
        kinds = Kinds(graph)
        editor = Editor(program, graph)
        outputs = step.output_nodes()
        node, chain = outputs["logits"], []
        while (inner := _inner(node, kinds)) is not None:
            chain.append(node)
            node = inner
        if chain and scales(chain[-1]):  # what the last layer gives
            node = chain.pop()
        batch = step.input("tokens").meta["val"].shape[0]
        rows = editor.placeholder("rows", (batch, editor.symbol("N", _ROWS)), torch.int64)
        with graph.inserting_after(node):
            taken = editor.call(take_rows.default, node, rows)
        first = chain[-1] if chain else None
        if first is None:
            outputs["logits"] = taken
        else:
            first.replace_input_with(node, taken)
        for changed in reversed(chain):
            changed.meta["val"] = editor.value(changed)
        last = outputs["logits"]
        if last.meta["val"].dtype is not torch.float32:
            with graph.inserting_after(last):
                outputs["logits"] = editor.call(aten._to_copy.default, last, dtype=torch.float32)
        step.set_outputs(outputs)
        heads = [n.name for n in chain if n.target is aten.linear.default]
        return Report(changed=1, refused=[] if heads else ["no linear output head found"])


def output_head(program: Program) -> Stored | None:
    """The matrix [V,E] whose product with a hidden state gives the logits; None where they come about otherwise."""
    kinds = Kinds(program.step.graph)
    node: fx.Node | None = program.step.output_nodes()["logits"]
    while node is not None and node.target is not aten.linear.default:
        node = _inner(node, kinds)
    weight = None if node is None else node.args[1]
    if not isinstance(weight, fx.Node) or weight.op != "get_attr":
        return None
    return program.params.stored(str(weight.target))


def scales(node: fx.Node) -> bool:
    """Whether it is a value times one number of the model's."""
    scale = node.args[1] if node.target is aten.mul.Tensor else None
    if not isinstance(scale, fx.Node) or scale.op != "get_attr":
        return False
    return all(size == 1 for size in scale.meta["val"].shape)


def _inner(node: fx.Node, kinds: Kinds) -> fx.Node | None:
    """The one [B,T,E] value that a per-token operator is applied to."""
    op = getattr(node.target, "overloadpacket", None)
    data = [n for n in node.all_input_nodes if kinds[n] == "data"]
    if node.op != "call_function" or op not in _PER_TOKEN or len(data) != 1:
        return None
    others = [n for n in node.all_input_nodes if n is not data[0]]
    value = data[0].meta.get("val")
    if (
        not isinstance(value, Tensor)
        or value.dim() != 3
        or any(kinds[n] != "const" for n in others)
    ):
        return None
    return data[0]
