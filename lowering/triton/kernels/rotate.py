"""Rope in Triton: a program takes ROWS heads of tokens, one below the other."""

import triton
import triton.language as tl

from accel.lowering.triton.kernels import Variant
from accel.lowering.triton.kernels._turn import turned


@triton.jit
def rotate(
    x, positions, cos, sin, out, T, heads, half, x_b, x_h, x_t, p_b,
    D: tl.constexpr, TURN: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (ceil(T·H / ROWS), B): x [B,H,T,D] -> out [B,T,H,D]."""
    m = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    b = tl.program_id(1).to(tl.int64)
    t, h, real = m // heads, m % heads, m < T * heads
    d = tl.arange(0, BLOCK)[None, :]
    position = tl.load(positions + b * p_b + t, mask=real, other=0)[:, None]
    source = (x + b * x_b + h * x_h + t * x_t)[:, None]
    row = turned(source, real[:, None], d, position, cos, sin, half, D, TURN)
    tl.store(out + (b * T * heads + m)[:, None] * D + d, row, mask=real[:, None] & (d < D))


VARIANTS = tuple(
    Variant(
        rotate, {"*fp32": "x cos sin out", "*i64": "positions", "i32": "T heads half x_b x_h x_t p_b"},
        {"D": 128, "TURN": turn, "ROWS": 16, "BLOCK": 128}, num_stages=3,
    )
    for turn in ("halves", "pairs")
)  # fmt: skip
