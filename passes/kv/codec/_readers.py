"""What a build says of codes that no attention reads in place."""

from __future__ import annotations

from torch import fx

from accel.ir.ops.codec import decode_rows, decode_static, look_up_rows
from accel.ir.ops.groups import group_dequantize
from accel.ir.ops.op import operand_of
from accel.ir.program import Program
from accel.passes.kv.codec._layer import Layer

READ = frozenset(
    {decode_rows.default, look_up_rows.default, group_dequantize.default, decode_static.default}
)
"""What attention reads through to the codes, where nothing stands behind it."""
HEAD = 8  # numbers: GroupQueryAttention of onnxruntime takes heads of a multiple of so many

Decoded = list[
    tuple[Layer, fx.Node]
]  # what a step decodes: of which buffer, and what attention gets


def note_decoding(program: Program, decoded: Decoded) -> None:
    """Say which layers' codes each step decodes before attention, and how many bytes of floats it makes of them."""
    lost = {layer.number for layer, node in decoded if not _is_read(node)}
    buffers = {(layer.number, layer.role): layer for layer, _ in decoded if layer.number in lost}
    if not buffers:
        return
    bytes_ = sum(4 * layer.heads * layer.width for layer in buffers.values())
    codec = next(iter(buffers.values())).codec
    which = "all layers" if len(lost) == len(program.facts.layers) else f"{len(lost)} layers"
    program.facts.notes.append(
        f"kv.codec {getattr(codec, 'key', type(codec).__name__)}: no attention reads its codes in place, so each step "
        f"decodes every stored token of {which} first, to {bytes_:,} bytes of floats a token; kivi, kv-int8 and kv-fp8 "
        "are read in place"
    )


def _is_read(node: fx.Node) -> bool:
    """Of scales that were there before, native attention reads 8 bits, and GroupQueryAttention what it takes."""
    if node.target is not decode_static.default:
        return node.target in READ
    found = operand_of(node, "bits") == 8 or operand_of(node, "width") % HEAD == 0
    return node.target in READ and found
