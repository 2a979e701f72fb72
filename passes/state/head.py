"""Logits only where they are asked for."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, fx

from accel.ir.ops.rows import given_rows, take_rows
from accel.ir.program import Editor, Program
from accel.ir.weights import Stored
from accel.passes import Pass, Report
from accel.passes.recognise.region import Kinds, numbering
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
    scales the last layer; also where other numbers of the same tokens lie behind the logits.
    """

    after = (Cache,)
    must_change = True

    def run(self, program: Program) -> Report:
        step, graph = program.step, program.step.graph
        kinds = Kinds(graph)
        editor = Editor(program, graph)
        outputs = step.output_nodes()
        node, chain = _nearest(outputs["logits"], kinds)
        if chain and scales(chain[-1]) and not any(node in n.all_input_nodes for n in chain[:-1]):
            node = chain.pop()  # what the last layer gives
        batch = step.input("tokens").meta["val"].shape[0]
        rows = editor.placeholder("rows", (batch, editor.symbol("N", _ROWS)), torch.int64)
        with graph.inserting_after(node):
            taken = editor.call(take_rows.default, node, rows)
        if not chain:
            outputs["logits"] = taken
        if chain and chain[0].target is given_rows.default:
            with graph.inserting_before(chain[0]):
                beside = editor.call(take_rows.default, _operand(chain[0], 1), rows)
            chain[0].update_arg(1, beside)
        for changed in reversed(chain):
            changed.replace_input_with(node, taken)
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
        inner = _inner(node, kinds)
        node = inner[0] if len(inner) == 1 else None
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


def _nearest(logits: fx.Node, kinds: Kinds) -> tuple[fx.Node, list[fx.Node]]:
    """The value furthest from the logits of which they are made token by token, on every way, and what lies between,
    the last first.
    """
    order, left, passed = numbering(logits.graph), {logits}, list[fx.Node]()
    found = logits, list[fx.Node]()
    if logits.target is given_rows.default:  # what a head computes beside them, of the same tokens
        left, passed = {_operand(logits, 0)}, [logits]
    while left:
        last = max(left, key=order.__getitem__)
        if len(left) == 1:
            found = last, list(passed)
        inner = _inner(last, kinds)
        if not inner:
            break
        left.remove(last)
        left.update(inner)
        passed.append(last)
    return found


def _operand(node: fx.Node, place: int) -> fx.Node:
    found = node.args[place]
    assert isinstance(found, fx.Node)
    return found


def _inner(node: fx.Node, kinds: Kinds) -> list[fx.Node]:
    """The [B,T,E] values that a per-token operator is applied to: one, or several that it lays side by side."""
    op = getattr(node.target, "overloadpacket", None)
    data = [n for n in node.all_input_nodes if kinds[n] == "data"]
    beside = op is aten.cat and len(node.args) > 1 and node.args[1] in (-1, 2)
    if node.op != "call_function" or not (beside or op in _PER_TOKEN and len(data) == 1):
        return []
    others = [n for n in node.all_input_nodes if n not in data]
    values = [n.meta.get("val") for n in data]
    if any(not isinstance(v, Tensor) or v.dim() != 3 for v in values):
        return []
    return [] if any(kinds[n] != "const" for n in others) else data
