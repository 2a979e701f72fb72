"""Writing into a cache in 8 bits: a program takes ROWS heads of tokens, one below the other."""

import triton
import triton.language as tl

from accel.lowering.triton.kernels import Variant
from accel.lowering.triton.kernels._turn import turned


@triton.jit
def _encoded(row):
    """encode_rows: rows [M,N], zeros beyond their width -> codes and scales [M]."""
    scale = tl.div_rn(tl.maximum(tl.max(tl.abs(row), 1), 1e-30), 127.0) + tl.sum(row * 0, 1)
    steps = tl.div_rn(row, scale[:, None] + tl.zeros_like(row))
    steps = (steps + 12582912.0) - 12582912.0  # to whole numbers, halves to even ones
    return tl.where(steps == steps, steps, 0.0).to(tl.int8), scale


@triton.jit
def place_coded(
    x, codes, scales, slots, positions, cos, sin, T, groups, capacity, half, x_b, x_h, x_t, p_b,
    D: tl.constexpr, TURN: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """As `place`: x, turned and rounded, into codes int8 [B,G,C,D] and scales [B,G,C]."""
    m = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    b = tl.program_id(1).to(tl.int64)
    t, g, real = m // groups, m % groups, m < T * groups
    d = tl.arange(0, BLOCK)[None, :]
    slot = (b * groups + g) * capacity + tl.load(slots + b) + t
    position = t[:, None]
    if TURN != "no":
        position = tl.load(positions + b * p_b + t, mask=real, other=0)[:, None]
    source = (x + b * x_b + g * x_h + t * x_t)[:, None]
    code, scale = _encoded(turned(source, real[:, None], d, position, cos, sin, half, D, TURN))
    tl.store(codes + slot[:, None] * D + d, code, mask=real[:, None] & (d < D))
    tl.store(scales + slot, scale, mask=real)


VARIANTS = (
    Variant(
        place_coded, {
            "*fp32": "x scales cos sin", "*i8": "codes", "*i64": "slots positions",
            "i32": "T groups capacity half x_b x_h x_t p_b",
        }, {"D": 128, "TURN": "halves", "ROWS": 16, "BLOCK": 128}, num_stages=3,
    ),
)  # fmt: skip
