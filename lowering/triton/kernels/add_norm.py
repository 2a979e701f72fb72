"""A residual stream and its RMSNorm in one launch (`ir.ops.norm.add_rms_norm`)."""

import triton
import triton.language as tl

from accel.lowering.triton.kernels import Variant


@triton.jit
def add_norm(x, y, weight, out, total, E, eps, x_m, y_m, BLOCK: tl.constexpr):
    """Grid (M): rows of x and y [M,E] -> `total` x + y, and `out`, its norm times `weight` [E]."""
    row = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, BLOCK)
    real = e < E
    both = tl.load(x + row * x_m + e, mask=real, other=0.0)
    both += tl.load(y + row * y_m + e, mask=real, other=0.0)
    wide = both.to(tl.float32)
    shrink = tl.rsqrt(tl.sum(wide * wide, 0) / E + eps)
    normed = (wide * shrink).to(both.dtype) * tl.load(weight + e, mask=real, other=0.0)
    tl.store(total + row * E + e, both, mask=real)
    tl.store(out + row * E + e, normed, mask=real)


VARIANTS = tuple(
    Variant(
        add_norm, {kind: "x y weight out total", "i32": "E x_m y_m", "fp32": "eps"}, {"BLOCK": block}, warps
    )
    for kind, block, warps in (("*fp32", 1024, 4), ("*fp32", 8192, 8), ("*bf16", 2048, 4))
)  # fmt: skip
