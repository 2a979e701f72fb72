"""accel's own compiled operators: keys, values and weights of few bits are read once, at the memory's speed."""

from __future__ import annotations

from typing import Any

import torch

from accel.ir.ops import attention, codec, quantized
from accel.lowering import Table
from accel.lowering.onnx.builder import Builder
from accel.lowering.onnx.native import DOMAIN, library
from accel.lowering.onnx.native.join import join

lower = Table("native", bit_exact=True, missing=lambda: library()[1], join=join)
_MASKS = ("causal", "window", "chunk", "full")  # their numbers in native/attention.cc


@lower(attention.attention.default)
def attend(b: Builder, *operands: Any, **more: Any) -> Any:
    """Every form has one, a tree aside; `exact` keeps a row's bits the same however many rows a call
    has. Codes are read as they lie.
    """
    x = attention.Operands[str](*operands, **more)
    if x.tree is not None:
        return NotImplemented
    held = [name for name in (x.k, x.v, x.kept_k, x.kept_v) if name]
    codes = {name: found for name in held if (found := _codes(b, name))}
    coded = len(codes) == len(set(held))
    given = (x.q, x.k, x.v, x.q_pos, x.k_pos, x.bias, x.sink, x.kept_k, x.kept_v)
    read = [codes[name][0] if coded and name in codes else name for name in given]
    return b.node(
        "AttentionInt8" if coded else "Attention", *read, x.kept_pos, *(codes[n][1] for n in held if coded),
        domain=DOMAIN, scale=float(x.scale), softcap=float(x.softcap),
        mask=_MASKS.index(x.mask), window=x.window, exact=int(b.bit_exact), packed=0,
    )  # fmt: skip


def _codes(b: Builder, value: str) -> list[str]:
    """The codes and scales that a value was decoded from, where it was."""
    made = next((n for n in reversed(b.nodes) if value in n.output), None)
    coded = made is not None and (made.op_type, made.domain) == ("Decode", DOMAIN)
    return list(made.input) if made is not None and coded else []


@lower(codec.encode_rows.default)
def encode_rows(b: Builder, x: str) -> Any:
    return b.node("Encode", x, domain=DOMAIN, outputs=2)


@lower(codec.decode_rows.default)
def decode_rows(b: Builder, q: str, scale: str) -> Any:
    """Only for who needs the numbers: attention reads the codes."""
    return b.node("Decode", q, scale, domain=DOMAIN)


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
) -> Any:
    """The weights as they lie in the file: onnxruntime keeps no copy of its own."""
    if b.dtype(x) != torch.float32 or bits not in (4, 8) or (bits == 8 and zeros is not None):
        return NotImplemented
    operands = (x, q, scales, zeros, bias)
    return b.node(
        "Linear", *operands, domain=DOMAIN, bits=bits, block=block, gate=0, epsilon=0.0,
        exact=int(b.bit_exact),
    )  # fmt: skip
