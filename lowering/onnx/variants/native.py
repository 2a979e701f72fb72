"""Attention as accel's own compiled operator: it reads each key and value once, at the memory's speed."""

from __future__ import annotations

from accel.ir.ops import attention
from accel.lowering import Table
from accel.lowering.onnx.builder import Builder
from accel.lowering.onnx.native import DOMAIN, library

lower = Table("native", bit_exact=True, missing=lambda: library()[1])
_MASKS = ("causal", "window", "chunk", "full")  # their numbers in native/attention.cc


@lower(attention.attention.default)
def attend(
    b: Builder,
    q: str,
    k: str,
    v: str,
    q_pos: str,
    k_pos: str,
    bias: str | None,
    scale: float,
    softcap: float,
    mask: str,
    window: int,
    sink: str | None = None,
) -> str:
    """Every form has one; `exact` keeps a row's bits the same however many rows a call has."""
    operands = (q, k, v, q_pos, k_pos, bias, sink)
    return str(
        b.node(
            "Attention", *operands, domain=DOMAIN, scale=float(scale), softcap=float(softcap),
            mask=_MASKS.index(mask), window=window, exact=int(b.bit_exact),
        )
    )  # fmt: skip
