"""Keys and values as caches hold them: numbers, or codes, decoded on the way (`ir.ops.codec`, `ir.ops.groups`)."""

import triton
import triton.language as tl


@triton.jit
def _steps(codes, at, place, real, BYTES: tl.constexpr, BITS: tl.constexpr):
    byte = tl.load(codes + at, mask=real, other=0).to(tl.int32)
    return ((byte >> (place // BYTES * BITS)[None, :]) & (2**BITS - 1)).to(tl.float32)


@triton.jit
def stored(
    base, more, least, finer, coarse, at, slot, d, exists, row, g, slots,
    D: tl.constexpr, KIND: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
    FINER: tl.constexpr,
):  # fmt: skip
    """Numbers [N,D] of the slots [N] of row·head `row`, whose head is g, of so many slots.

    KIND "": as they lie from `at` [N] on, numbers or codes whose scales come later. "table": places in `more`.
    "static": codes of 8 or 4 BITS, with scales `more` of a channel of a head (GROUP 1), or one of all (0).
    "rows", "channels": blocks of ROWS slots in codes of BITS bits, `more` and `least` the scale and minimum of a group:
    GROUP rows of a channel, or channels of a row; FINER: `finer` holds further codes, read unless `coarse` [] holds.
    """
    real = exists[:, None] & (d < D)[None, :]
    if KIND == "rows" or KIND == "channels":
        BYTES: tl.constexpr = (D * BITS + 7) // 8
        block, r = slot // ROWS, slot % ROWS
        blocks = slots // ROWS
        first = (row * blocks * ROWS + slot) * BYTES
        where = first[:, None] + (d % BYTES)[None, :]
        number = _steps(base, where, d, real, BYTES, BITS)
        if FINER:
            fine = tl.load(coarse) == 0
            off = _steps(finer, where, d, real & fine, BYTES, BITS) - 2 ** (BITS - 1)
            number += tl.where(fine, off / 2**BITS, 0.0)
        if KIND == "rows":
            line = (row * blocks + block) * (ROWS // GROUP) + r // GROUP
            place = line[:, None] * D + d[None, :]
        else:
            COUNT: tl.constexpr = (D + GROUP - 1) // GROUP
            place = (row * blocks * ROWS + slot)[:, None] * COUNT + (d // GROUP)[None, :]
        scale = tl.load(more + place, mask=real, other=0.0).to(tl.float32)
        number = number * scale + tl.load(least + place, mask=real, other=0.0).to(tl.float32)
    elif KIND == "static" and BITS == 4:
        byte = tl.load(base + at[:, None] + (d // 2)[None, :], mask=real, other=0).to(tl.int32)
        code = ((byte >> (d % 2 * 4)[None, :]) & 15) - 8
        scale = tl.load(more + GROUP * (g * D + d), mask=d < D, other=0.0)
        number = tl.where(real, code * scale[None, :], 0.0)
    else:
        number = tl.load(base + at[:, None] + d[None, :], mask=real, other=0)
        if KIND == "static":
            scale = tl.load(more + GROUP * (g * D + d), mask=d < D, other=0.0)
            number = number * scale[None, :]
        if KIND == "table":
            number = tl.load(more + number.to(tl.int32), mask=real, other=0.0)
    return number
