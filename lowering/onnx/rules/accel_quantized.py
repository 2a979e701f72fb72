"""Weights of few bits: com.microsoft's MatMulNBits and GatherBlockQuantized over the same bytes.

Always accuracy level 4 (8-bit activations): at any other level 2 and 8 bits fall to a path that is
some hundred times slower, and 4 bits lose their speed beyond one row.
"""

from __future__ import annotations

import torch

from accel.ir.errors import LoweringError
from accel.ir.ops import quantized
from accel.lowering.onnx.writer.builder import MICROSOFT, Builder, Param
from accel.lowering.onnx.writer.table import lower


@lower(quantized.quantized_linear.default)
def quantized_linear(
    b: Builder,
    x: str,
    q: str,
    scales: str,
    zeros: str | None,
    bias: str | None,
    bits: int,
    block: int,
) -> str:
    if bits not in (4, 8):
        raise LoweringError(f"onnx: no matmul with {bits}-bit weights; use 4 or 8")
    sizes = {"K": int(b.shape(x)[-1]), "N": int(b.shape(q)[0]), "bits": bits, "block_size": block}
    operands = (x, q, _wide(b, scales), zeros, None, bias)
    return str(b.node("MatMulNBits", *operands, domain=MICROSOFT, accuracy_level=4, **sizes))


@lower(quantized.quantized_embedding.default)
def quantized_embedding(
    b: Builder, ids: str, q: str, scales: str, zeros: str | None, bits: int, block: int, width: int
) -> str:
    """Scales that are no float32 are widened in the rows that are read, where there are no zero points: all would take
    more memory than the weight's share of a step.
    """
    rows, blocks, size = b.shape(q)
    flat = b.viewed(q, (rows, blocks * size)) if isinstance(q, Param) else _flat(b, q)
    narrow = isinstance(scales, Param) and (b.parts(scales) or b.dtype(scales) != torch.float32)
    if isinstance(scales, Param) and narrow and zeros is None:
        flat, scales, ids = _rows_alone(b, ids, flat, scales)
    found = b.node(
        "GatherBlockQuantized", flat, ids, _wide(b, scales), zeros,
        domain=MICROSOFT, bits=bits, block_size=block, gather_axis=0, quantize_axis=1,
    )  # fmt: skip
    if width == blocks * block:
        return str(found)
    return str(b.node("Slice", found, b.ints(0), b.ints(width), b.ints(-1)))


def _rows_alone(b: Builder, ids: str, flat: str, scales: Param) -> tuple[str, str, str]:
    """A weight's bytes and scales in the rows `ids`, and the places of these rows in them."""
    each = b.node("Reshape", ids, b.ints(-1))
    parts = [
        b.cast(b.node("Gather", part, each), torch.float32) for part in b.parts(scales) or (scales,)
    ]
    found = parts[0]
    if len(parts) > 1:
        few = b.shape(b.parts(scales)[0])[1]
        fine = b.node("Reshape", parts[1], b.ints(0, few, -1))
        scaled = b.node("Mul", fine, b.node("Unsqueeze", found, b.ints(2)))
        found = b.node("Reshape", scaled, b.ints(0, -1))
    count = b.node("Size", ids)
    places = b.node("Range", b.constant(0, torch.int64), count, b.constant(1, torch.int64))
    return b.node("Gather", flat, each), found, b.node("Reshape", places, b.node("Shape", ids))


def _wide(b: Builder, scales: str) -> str:
    """In float32, which the operators take; onnxruntime widens them once, when it opens the graph."""
    return b.cast(scales, torch.float32)


def _flat(b: Builder, q: str) -> str:
    return str(b.node("Reshape", q, b.ints(0, -1)))
