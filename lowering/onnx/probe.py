"""A few layers' attention, or the products of one, with nothing around it: small graphs by which variants
are compared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import onnx
from onnx import helper
from torch import fx
from torch.fx.node import map_arg

from accel.ir.ops.attention import Operands, attention
from accel.ir.ops.codec import decode_halves, decode_rows, decode_static, encode_static
from accel.ir.ops.kv import kv_append
from accel.ir.ops.op import operand_of
from accel.ir.ops.quantized import quantized_linear
from accel.ir.program import Program
from accel.ir.state import output_of
from accel.ir.weights import Stored
from accel.lowering import Table
from accel.lowering.onnx.writer.builder import DTYPES, Builder, Param, finished
from accel.lowering.onnx.writer.fallback import lower_node
from accel.lowering.onnx.writer.outputs import name_outputs

_NOT_HERE = ("kept_", "beside", "pages")  # operands that are left out
_NAMES = tuple(f.name for f in fields(Operands))
_LETTERS = {
    "q": "BHTD", "k": "BGCD", "v": "BGCD", "q_pos": "BT", "k_pos": "BC", "tree": "BTW", "first": "B",
}  # fmt: skip
LAYERS = 4  # about so many, so that a mask shared by layers weighs as it does in the step


def attention_probe(
    program: Program, variant: Table | None, nodes_of_step: int, batch_invariant: bool = False
) -> onnx.ModelProto:
    """Attention of each form that the step has, as often as its share of the layers asks for.

    Inputs: `positions [B,T]`, `held [B,C]` (the positions in the slots; `held.X [B,X]` of
    cross-attention over an encoder's fixed X), and of each node its own queries, keys and values.
    The metadata `share` is the part of the step's attention that it holds, `nodes` how many nodes the step has.
    """
    nodes = program.nodes(attention.default, entry=program.step)
    forms = Counter(_form(node) for node in nodes)
    kinds = {_form(node): node for node in nodes}
    b = Builder(_no_weights, variant, batch_invariant=batch_invariant)
    inputs: dict[str, onnx.ValueInfoProto] = {}
    outputs: list[onnx.ValueInfoProto] = []
    for form, count in forms.items():
        for _ in range(max(1, round(count * LAYERS / len(nodes)))):
            node = kinds[form]
            out = lower_node(b, node, *_operands(b, inputs, node, len(outputs)))
            outputs.append(helper.make_tensor_value_info(out, DTYPES[node.meta["val"].dtype], None))
    share = len(outputs) / len(nodes)
    outputs += _written(b, inputs)
    b.prune([o.name for o in outputs])
    model = finished(b, "probe", list(inputs.values()), outputs)
    helper.set_model_props(model, {"share": str(share), "nodes": str(nodes_of_step)})
    return model


def products_probe(
    program: Program,
    variant: Table | None,
    nodes_of_step: int,
    weights: Callable[[str, Stored], onnx.TensorProto],
) -> onnx.ModelProto:
    """A product with weights of few bits for each form that layers repeat, or else for each there is.

    Inputs: `x.K [B,T,K]`. The weights are the first of their form, where the step has them. The
    metadata `share` is the part of the bytes of all such weights that it holds, `nodes` how many nodes the step has.
    """
    nodes = program.nodes(quantized_linear.default, entry=program.step)
    forms: dict[tuple[str, ...], list[fx.Node]] = {}
    for node in nodes:
        forms.setdefault(_form(node), []).append(node)
    chosen = [same[0] for same in forms.values() if len(same) > 1] or [n[0] for n in forms.values()]
    b = Builder(weights, variant)
    inputs: dict[str, onnx.ValueInfoProto] = {}
    outputs: list[onnx.ValueInfoProto] = []

    def operand(node: fx.Node) -> str:
        if node.op == "get_attr":
            return Param(str(node.target), program.params.stored(str(node.target)))
        fake = node.meta["val"]
        name = f"x.{fake.shape[-1]}"
        b.meta[name] = fake
        sizes = ["B", "T", int(fake.shape[-1])]
        inputs[name] = helper.make_tensor_value_info(name, DTYPES[fake.dtype], sizes)
        return name

    for node in chosen:
        args: Any = map_arg((node.args, node.kwargs), operand)
        made = lower_node(b, node, *args)
        outputs.append(helper.make_tensor_value_info(made, DTYPES[node.meta["val"].dtype], None))
    model = finished(b, "products", list(inputs.values()), outputs)
    share = _bytes(chosen) / _bytes(nodes)
    helper.set_model_props(model, {"share": str(share), "nodes": str(nodes_of_step)})
    return model


def _bytes(products: list[fx.Node]) -> int:
    """Of their weights."""
    return sum(
        int(n.args[1].meta["val"].numel()) for n in products if isinstance(n.args[1], fx.Node)
    )


def _form(node: fx.Node) -> tuple[str, ...]:
    """What makes attention cost what it costs: the sizes of its operands, and its options."""
    args = [*node.args, *node.kwargs.values()]
    return tuple(str(tuple(a.meta["val"].shape) if isinstance(a, fx.Node) else a) for a in args)


def _operands(
    b: Builder, inputs: dict[str, onnx.ValueInfoProto], node: fx.Node, index: int
) -> tuple[Any, Any]:
    """The node's arguments as inputs of the probe; what the node reads twice is one input. Where keys or
    values are decoded, their codes and scales are; where scales were there before, also what is appended.
    Nothing was kept or is merged in, and every page is read.
    """
    options = {n: v for n, v in node.kwargs.items() if not n.startswith((*_NOT_HERE, "page"))}
    named = zip(_NAMES, node.args, strict=False)
    args = [None if role.startswith(_NOT_HERE) else value for role, value in named]
    given: dict[str, Any] = dict(zip(_NAMES, args, strict=False)) | options
    names: dict[fx.Node, str] = {}
    for role, value in given.items():
        if not isinstance(value, fx.Node) or value in names:
            continue
        fake = value.meta["val"]
        if value.target in (decode_rows.default, decode_halves.default):
            coded = zip(value.all_input_nodes, ("codes", "scale"), strict=False)
            parts = [
                _input(b, inputs, f"{role}.{index}.{p}", "BGC", n.meta["val"]) for n, p in coded
            ]
            names[value] = lower_node(b, value, parts, {})
            b.meta[names[value]] = fake
            continue
        if value.target is decode_static.default:
            names[value] = _appended(b, inputs, f"{role}.{index}", value)
            continue
        fixed = f".{fake.shape[-1]}" if isinstance(fake.shape[-1], int) else ""
        shared = {"q_pos": "positions", "k_pos": f"held{fixed}"}
        name = shared.get(role, f"{role}.{index}")
        names[value] = _input(b, inputs, name, _LETTERS.get(role, ""), fake)
    return map_arg((args, options), names.__getitem__)


def _appended(b: Builder, inputs: dict[str, onnx.ValueInfoProto], name: str, read: fx.Node) -> str:
    """Codes that the call appends to, as numbers: a variant may do all of it in one operator. What a step appends to in
    place the probe gives as an output, too.
    """
    write, scale = read.args[:2]
    assert isinstance(write, fx.Node) and isinstance(scale, fx.Node)
    steps = _input(b, inputs, f"{name}.scale", "", scale.meta["val"])
    made = operand_of(write, "new") if write.target is kv_append.default else None
    if made is None or made.target is not encode_static.default:
        codes = _input(b, inputs, f"{name}.codes", "BGC", write.meta["val"])
    else:
        new = _input(b, inputs, f"{name}.new", "BGTD", made.args[0].meta["val"])
        slots = _input(b, inputs, "slots", "B", operand_of(write, "slots").meta["val"])
        buffer = _input(b, inputs, f"{name}.codes", "BGC", write.meta["val"])
        encoded = lower_node(b, made, (new, steps, *made.args[2:]), {})
        b.meta[encoded] = made.meta["val"]
        codes = lower_node(b, write, (buffer, encoded, slots), {})
        b.meta[codes] = write.meta["val"]
    numbers: str = lower_node(b, read, (codes, steps, *read.args[2:]), {})
    b.meta[numbers] = read.meta["val"]
    return numbers


def _written(b: Builder, inputs: dict[str, onnx.ValueInfoProto]) -> list[onnx.ValueInfoProto]:
    """Outputs of what was appended to."""
    appends = {
        value: call.operands[0]
        for value, (call, *_) in b.lowered.items()
        if call.node.target is kv_append.default
    }
    name_outputs(b, {output_of(to): b.instead.get(value, value) for value, to in appends.items()})
    kinds = {to: inputs[to].type.tensor_type.elem_type for to in appends.values()}
    return [helper.make_tensor_value_info(output_of(to), kind, None) for to, kind in kinds.items()]


def _input(
    b: Builder, inputs: dict[str, onnx.ValueInfoProto], name: str, letters: str, fake: Any
) -> str:
    """An input of the probe, of the value's dtype and sizes."""
    b.meta[name] = fake
    sizes = [d if isinstance(d, int) else letters[i] for i, d in enumerate(fake.shape)]
    inputs[name] = helper.make_tensor_value_info(name, DTYPES[fake.dtype], sizes)
    return name


def _no_weights(name: str, value: object) -> Any:
    raise ValueError(f"a probe has no weights, but {name} is a weight")
