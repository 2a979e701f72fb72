"""Products with weights of few bits, whose codes are read as they lie (`ir.ops.quantized`).

Inputs are rounded to whole numbers once (`steps_of`), for all products that read them. Of a block both factors are
then whole numbers below 2^11: a product on tensor cores of halves is exact, and is scaled in float32.
"""

import triton
import triton.language as tl

from accel.lowering.triton.kernels import Variant

GROUP = tl.constexpr(64)  # codes of a group of planes


@triton.jit
def _plane(rows, k, real, START: tl.constexpr, OWN: tl.constexpr, BYTES: tl.constexpr):
    """Numbers of OWN bits at k [K] in groups of BYTES bytes, those of the plane from byte START on."""
    at = (k // GROUP) * BYTES + START + (k % GROUP) * OWN // 8
    byte = tl.load(rows[:, None] + at[None, :], mask=real, other=0)
    shift = (k % GROUP) * OWN % 8
    return (byte >> shift[None, :].to(tl.uint8)) & (2**OWN - 1)


@triton.jit
def _codes(rows, block, real, BITS: tl.constexpr, BLOCK: tl.constexpr):
    """Codes [N,BLOCK] of one block of weights whose rows begin at rows [N]; `real` [N,1]: which there are."""
    if BITS == 8:
        k = block * BLOCK + tl.arange(0, BLOCK)
        code = tl.load(rows[:, None] + k[None, :], mask=real, other=0)
    elif BITS == 4:
        HALF: tl.constexpr = BLOCK // 2
        k = block * HALF + tl.arange(0, HALF)
        both = tl.load(rows[:, None] + k[None, :], mask=real, other=0)
        code = tl.interleave(both & 15, both >> 4)
    else:
        k = block * BLOCK + tl.arange(0, BLOCK)
        if BITS == 2:
            code = _plane(rows, k, real, 0, 2, 16)
        elif BITS == 3:
            code = _plane(rows, k, real, 0, 2, 24) | (_plane(rows, k, real, 16, 1, 24) << 2)
        elif BITS == 5:
            code = _plane(rows, k, real, 0, 4, 40) | (_plane(rows, k, real, 32, 1, 40) << 4)
        else:
            tl.static_assert(BITS == 6)
            code = _plane(rows, k, real, 0, 4, 48) | (_plane(rows, k, real, 32, 2, 48) << 4)
    return code


@triton.jit
def multiply(
    codes, steps, q, scales, zeros, bias, out, order, experts, starts, ends,
    M, N, blocks, row_bytes, zero_bytes,
    BITS: tl.constexpr, BLOCK: tl.constexpr, ZEROS: tl.constexpr, BIAS: tl.constexpr, ROUTED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of N, tiles of rows, SPLITS): inputs as `steps_of` gives them, weights q [N,…], `scales` [N,blocks]
    and `zeros` [N,…] where ZEROS -> out [M,N]; of several splits, each of which takes some blocks, [SPLITS,M,N].

    ROUTED: weights are of experts, q [X,N,…]; tile i of rows is `order`[starts[i]:ends[i]], of expert `experts`[i].
    """
    tile, split = tl.program_id(1), tl.program_id(2)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    there = m < M
    line = n.to(tl.int64)
    full = blocks
    if ROUTED:
        start, end = tl.load(starts + tile), tl.load(ends + tile)
        m = start + tl.arange(0, BLOCK_M)
        there = m < end
        m = tl.load(order + m, mask=there, other=0)
        line += tl.load(experts + tile).to(tl.int64) * N
        full = tl.where(start < end, blocks, 0)
    m = m.to(tl.int64)
    real = n < N
    rows = q + line * row_bytes
    per = tl.cdiv(blocks, SPLITS)
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for block in range(split * per, tl.minimum(split * per + per, full)):
        weight = _codes(rows, block, real[:, None], BITS, BLOCK).to(tl.float16)
        if ZEROS:
            if BITS <= 4:
                both = tl.load(zeros + line * zero_bytes + block // 2, mask=real, other=0)
                zero = (both.to(tl.int32) >> (block % 2) * 4) & 15
            else:
                zero = tl.load(zeros + line * zero_bytes + block, mask=real, other=0)
            weight -= zero.to(tl.float16)[:, None]
        else:
            weight -= 2 ** (BITS - 1)
        k = block * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(codes + m[None, :] * blocks * BLOCK + k[:, None], mask=there[None, :], other=0)
        scale = tl.load(scales + line * blocks + block, mask=real, other=0).to(tl.float32)
        step = tl.load(steps + m * blocks + block, mask=there, other=0)
        acc += tl.dot(weight, x.to(tl.float16)) * scale[:, None] * step[None, :]
    if BIAS:
        acc += tl.where(split == 0, tl.load(bias + n, mask=real, other=0.0), 0.0)[:, None]
    place = out + (split * M + m).to(tl.int64)[None, :] * N + n[:, None]
    tl.store(place, acc, mask=real[:, None] & there[None, :])


_TYPES = {
    "*i8": "codes", "*fp32": "steps bias out", "*u8": "q zeros", "*i64": "order", "*i32": "experts starts ends",
    "i32": "M N blocks row_bytes zero_bytes",
}  # fmt: skip


def _product(bits: int, block: int, m: int, n: int, scales: str = "*bf16", **more: bool) -> Variant:
    constants = dict(BITS=bits, BLOCK=block, ZEROS=False, BIAS=False, ROUTED=False, SPLITS=2)
    types = {**_TYPES, scales: f"{_TYPES.get(scales, '')} scales"}
    warps = 8 if m * n >= 4096 else 4
    return Variant(multiply, types, constants | {"BLOCK_M": m, "BLOCK_N": n} | more, warps, 3)


VARIANTS = (
    _product(4, 32, 16, 64),
    _product(4, 128, 64, 64, ZEROS=True, BIAS=True),
    _product(4, 32, 128, 64),
    _product(4, 32, 64, 128),
    _product(8, 16, 16, 64, "*fp32", ROUTED=True),
    _product(8, 128, 64, 64, "*fp32", ZEROS=True),
    *(_product(bits, 32, 32, 64, "*fp16") for bits in (2, 3, 5, 6)),
)
