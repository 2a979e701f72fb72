"""Inputs of products with weights of few bits, rounded to 8 bits (`ir.ops.quantized.round_activations`)."""

import triton
import triton.language as tl

from accel.lowering.triton.kernels import Variant

MAGIC = tl.constexpr(
    12582912.0
)  # 1.5 · 2^23: added and taken away, it leaves whole numbers, halves the even ones


@triton.jit
def steps_of(
    x, codes, steps, K, blocks, x_m,
    BLOCK: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """Grid (M, ceil(blocks / COUNT)): rows of x [M,K] -> codes int8 [M,blocks·BLOCK] and a step of each block, `steps`
    [M,blocks]; that of a block that holds what is no finite number is NaN.
    """
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * COUNT + tl.arange(0, COUNT)
    k = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    real = (block < blocks)[:, None]
    number = tl.load(x + row * x_m + k, mask=real & (k < K), other=0.0)
    step = tl.div_rn(tl.max(tl.abs(number), 1), 127.0)
    by = tl.where(step == 0, 1.0, step)
    code = tl.div_rn(number, by[:, None] + tl.zeros_like(number))
    code = (code + MAGIC) - MAGIC
    code = tl.where(code == code, code, 0.0).to(tl.int8)
    tl.store(codes + row * blocks * BLOCK + k, code, mask=real)
    tl.store(steps + row * blocks + block, step + tl.sum(number * 0, 1), mask=block < blocks)


VARIANTS = (
    Variant(
        steps_of, {"*fp32": "x steps", "*i8": "codes", "i32": "K blocks x_m"}, {"BLOCK": 32, "COUNT": 8}, num_warps=1
    ),
)  # fmt: skip
