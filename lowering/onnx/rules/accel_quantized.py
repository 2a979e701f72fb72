"""Weights of few bits: com.microsoft's MatMulNBits and GatherBlockQuantized over the same bytes.

Always accuracy level 4 (8-bit activations): at any other level 2 and 8 bits fall to a path that is
some hundred times slower, and 4 bits lose their speed beyond one row.
"""

from __future__ import annotations

import torch
from onnx import TensorProto

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
    rows, blocks, size = b.shape(q)
    flat = b.viewed(q, (rows, blocks * size)) if isinstance(q, Param) else _flat(b, q)
    found = b.node(
        "GatherBlockQuantized", flat, ids, _wide(b, scales), zeros,
        domain=MICROSOFT, bits=bits, block_size=block, gather_axis=0, quantize_axis=1,
    )  # fmt: skip
    if width == blocks * block:
        return str(found)
    return str(b.node("Slice", found, b.ints(0), b.ints(width), b.ints(-1)))


def _wide(b: Builder, scales: str) -> str:
    """In float32, which the operators take; onnxruntime widens them once, when it opens the graph."""
    if b.dtype(scales) == torch.float32:
        return scales
    return str(b.node("Cast", scales, to=TensorProto.FLOAT))


def _flat(b: Builder, q: str) -> str:
    return str(b.node("Reshape", q, b.ints(0, -1)))
