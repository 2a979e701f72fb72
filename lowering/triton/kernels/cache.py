"""Rope, and writing into the cache, in Triton: a program takes ROWS heads of tokens, one below the other."""

import triton
import triton.language as tl


@triton.jit
def _turned(x, real, d, position, cos, sin, half, D: tl.constexpr, TURN: tl.constexpr):
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
    row = _turned(source, real[:, None], d, position, cos, sin, half, D, TURN)
    tl.store(out + (b * T * heads + m)[:, None] * D + d, row, mask=real[:, None] & (d < D))


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
    code, scale = _encoded(_turned(source, real[:, None], d, position, cos, sin, half, D, TURN))
    tl.store(codes + slot[:, None] * D + d, code, mask=real[:, None] & (d < D))
    tl.store(scales + slot, scale, mask=real)


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
    row = _turned(source, real[:, None], d, position, cos, sin, half, D, TURN)
    tl.store(buffer + slot * D + d, row, mask=real[:, None] & (d < D))
    if BOTH:
        source = (y + b * y_b + g * y_h + t * y_t)[:, None]
        row = tl.load(source + d, mask=real[:, None] & (d < DY), other=0.0)
        tl.store(second + slot * DY + d, row, mask=real[:, None] & (d < DY))
