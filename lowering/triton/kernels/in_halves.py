"""Rows in float16, of which none is too large."""

import triton
import triton.language as tl

from accel.lowering.triton.kernels import Variant


@triton.jit
def in_halves(x, out, scales, K, x_m, BLOCK: tl.constexpr):
    """Grid (M,): rows of x [M,K] -> float16 [M,K] and of each row a power of two, `scales` [M], by which it was
    divided: 1 where all numbers are below 2^15.
    """
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)
    most = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, K, BLOCK):
        number = tl.load(x + row * x_m + start + k, mask=start + k < K, other=0.0)
        most = tl.maximum(most, tl.abs(number))
    exponent = (tl.max(most, 0).to(tl.int32, bitcast=True) >> 23) - 127
    above = tl.maximum(exponent - 14, 0)
    scale = ((127 + above) << 23).to(tl.float32, bitcast=True)
    inverse = ((127 - above) << 23).to(tl.float32, bitcast=True)
    for start in range(0, K, BLOCK):
        number = tl.load(x + row * x_m + start + k, mask=start + k < K, other=0.0)
        tl.store(out + row * K + start + k, (number * inverse).to(tl.float16), mask=start + k < K)
    tl.store(scales + row, scale)


VARIANTS = (
    Variant(in_halves, {"*fp32": "x scales", "*fp16": "out", "i32": "K x_m"}, {"BLOCK": 1024}),
)
