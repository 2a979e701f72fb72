"""An activation and the product with what it gates in one launch (`ir.ops.norm.gate`)."""

import triton
import triton.language as tl

from accel.lowering.triton.kernels import Variant


@triton.jit
def _activated(x, ACT: tl.constexpr):
    if ACT == "silu":
        x = x * tl.sigmoid(x)
    elif ACT == "gelu":
        x = 0.5 * x * (1 + tl.erf(x * 0.7071067811865476))
    elif ACT == "gelu_tanh":  # 1 + tanh(z) = 2 sigmoid(2 z)
        x = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    elif ACT == "relu":
        x = tl.where(x < 0, 0.0, x)  # NaN stays
    else:
        tl.static_assert(ACT == "sigmoid")
        x = tl.sigmoid(x)
    return x


@triton.jit
def gated(gate, up, out, F, gate_m, up_m, ACT: tl.constexpr, BLOCK: tl.constexpr):
    """Grid (M, ceil(F / BLOCK)): rows of gate and up [M,F] -> out [M,F]."""
    row = tl.program_id(0).to(tl.int64)
    f = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = f < F
    x = tl.load(gate + row * gate_m + f, mask=real, other=0.0)
    y = tl.load(up + row * up_m + f, mask=real, other=0.0)
    tl.store(out + row * F + f, _activated(x.to(tl.float32), ACT).to(x.dtype) * y, mask=real)


VARIANTS = tuple(
    Variant(gated, {kind: "gate up out", "i32": "F gate_m up_m"}, {"ACT": act, "BLOCK": 1024})
    for kind, act in (
        ("*fp32", "silu"), ("*bf16", "silu"), ("*fp32", "gelu"), ("*fp32", "gelu_tanh"), ("*fp32", "relu"),
        ("*fp32", "sigmoid"),
    )
)  # fmt: skip
