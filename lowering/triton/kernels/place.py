"""Writing into a cache: a program takes ROWS heads of tokens, one below the other."""

import triton
import triton.language as tl

from accel.lowering.triton.kernels import Variant
from accel.lowering.triton.kernels._turn import turned


@triton.jit
def place(
    x, y, buffer, second, slots, positions, cos, sin, T, groups, capacity, half,
    x_b, x_h, x_t, y_b, y_h, y_t, p_b,
    D: tl.constexpr, DY: tl.constexpr, TURN: tl.constexpr, BOTH: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (ceil(T·G / ROWS), B): x [B,G,T,D], turned, into buffer [B,G,C,D], C = capacity; where BOTH, y
    [B,G,T,DY] as it is into `second`. Row b fills the slots slots[b] .. slots[b]+T-1.
    """
    m = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    b = tl.program_id(1).to(tl.int64)
    t, g, real = m // groups, m % groups, m < T * groups
    d = tl.arange(0, BLOCK)[None, :]
    slot = ((b * groups + g) * capacity + tl.load(slots + b) + t)[:, None]
    position = t[:, None]
    if TURN != "no":
        position = tl.load(positions + b * p_b + t, mask=real, other=0)[:, None]
    source = (x + b * x_b + g * x_h + t * x_t)[:, None]
    row = turned(source, real[:, None], d, position, cos, sin, half, D, TURN)
    tl.store(buffer + slot * D + d, row, mask=real[:, None] & (d < D))
    if BOTH:
        source = (y + b * y_b + g * y_h + t * y_t)[:, None]
        row = tl.load(source + d, mask=real[:, None] & (d < DY), other=0.0)
        tl.store(second + slot * DY + d, row, mask=real[:, None] & (d < DY))


VARIANTS = tuple(
    Variant(
        place, {
            "*fp32": "x y buffer second cos sin", "*i64": "slots positions",
            "i32": "T groups capacity half x_b x_h x_t y_b y_h y_t p_b",
        }, {"D": 128, "DY": 64, "TURN": turn, "BOTH": turn == "halves", "ROWS": 16, "BLOCK": 128}, num_stages=3,
    )
    for turn in ("halves", "no")
)  # fmt: skip
