"""Rope, of rows of which a program takes some, one below the other."""

import triton
import triton.language as tl


@triton.jit
def turned(x, real, d, position, cos, sin, half, D: tl.constexpr, TURN: tl.constexpr):
    """Rows [M,1] of D channels, turned by their positions: channel pairs (i, i + half), or (2i, 2i + 1)."""
    row = tl.load(x + d, mask=real & (d < D), other=0.0)
    if TURN != "no":
        if TURN == "halves":
            first = d < half
            other = tl.where(first, d + half, d - half)
            angle = tl.where(first, d, d - half)
        else:
            first = d % 2 == 0
            other = d ^ 1
            angle = d // 2
        turns = real & (d < 2 * half)
        at = tl.maximum(position, 0) * half + angle
        c = tl.load(cos + at, mask=turns, other=1.0).to(row.dtype)
        s = tl.load(sin + at, mask=turns, other=0.0).to(row.dtype)
        there = tl.load(x + other, mask=turns, other=0.0)
        row = tl.where(turns, row * c + tl.where(first, -there, there) * s, row)
    return row
