"""What a build says of codes that no attention reads in place."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from accel.ir.ops.codec import decode_halves, decode_rows, decode_static, look_up_rows
from accel.ir.ops.groups import group_dequantize
from accel.ir.ops.op import operand_of
from accel.ir.ops.patched import add_product, put_numbers, spread_rows
from accel.ir.program import Program
from accel.ir.region import Conditional, graphs_of
from accel.passes.kv.codec._layer import Layer

READ = frozenset(
    {
        decode_rows.default,
        decode_halves.default,
        look_up_rows.default,
        group_dequantize.default,
        decode_static.default,
        spread_rows.default,
    }
)
"""What attention reads through to the codes, where nothing stands behind it but what is `BESIDE` them."""
BESIDE = (add_product.default, put_numbers.default)  # in this order, each once
HEAD = 8  # numbers: GroupQueryAttention of onnxruntime takes heads of a multiple of so many

Decoded = list[
    tuple[Layer, fx.Node]
]  # what a step decodes: of which buffer, and what attention gets


def note_decoding(program: Program, decoded: Decoded) -> None:
    """Say which layers' codes each step decodes before attention, and how many bytes of floats it makes of them."""
    lost = {layer.number for layer, node in decoded if not reads_in_place(node)}
    buffers = {(layer.number, layer.role): layer for layer, _ in decoded if layer.number in lost}
    if not buffers:
        return
    bytes_ = sum(4 * layer.heads * layer.width for layer in buffers.values())
    codec = next(iter(buffers.values())).codec
    which = "all layers" if len(lost) == len(program.facts.layers) else f"{len(lost)} layers"
    program.facts.notes.append(
        f"kv.codec {getattr(codec, 'key', type(codec).__name__)}: no attention reads its codes in place, so each step "
        f"decodes every stored token of {which} first, to {bytes_:,} bytes of floats a token; kivi, gear, kv-int8 and "
        "kv-fp8 are read in place"
    )


def reads_in_place(node: fx.Node) -> bool:
    """Whether native attention, or GroupQueryAttention, reads the codes that a value was decoded from."""
    target: Any = node.target
    if target is operator.getitem:
        region, index = node.args
        return _either(region, index)
    if target is decode_static.default:  # 8 bits, or what GroupQueryAttention takes
        found = operand_of(node, "bits") == 8 or operand_of(node, "width") % HEAD == 0
        return target in READ and bool(found)
    if target in BESIDE:
        return _beside(node)
    return target in READ


def _beside(node: fx.Node) -> bool:
    """Numbers at places that a byte says, over a product, over codes, or fewer of these."""
    base: Any = operand_of(node, "x")
    if node.target is put_numbers.default:
        small = operand_of(node, "place").meta["val"].dtype == torch.uint8
        if not small or operand_of(node, "rows") > 256:
            return False
        if base.target is add_product.default:
            base = operand_of(base, "x")
    return base.target is group_dequantize.default and base.target in READ


def _either(region: Any, index: Any) -> bool:
    """Of a choice by the call between codes and the same with finer ones."""
    if not isinstance(region, fx.Node) or not isinstance(region.target, Conditional):
        return False
    outputs = [next(iter(g.find_nodes(op="output"))).args[0] for g in graphs_of(region.target)]
    found = [some[index] for some in outputs]
    plain = all(n.target is group_dequantize.default and n.target in READ for n in found)
    return plain and [operand_of(n, "finer") is None for n in found] == [True, False]
