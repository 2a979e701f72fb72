"""The largest numbers of rows, of equal ones the first (`ir.ties`): in rounds, which take the best of each stretch."""

import triton
import triton.language as tl

from accel.lowering.triton.kernels import Variant

LOWEST = tl.constexpr(-2147483648)  # of what is not there; -inf has a larger key


@triton.jit
def _keys(x, LARGEST: tl.constexpr):
    """Whole numbers in the order of float32 ones: NaN above all, 0 and -0 alike."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    key = tl.where(x == x, key, 0x7FFFFFFF)
    if not LARGEST:
        key = ~key
    return key


@triton.jit
def leading(
    x, names, keys, places, W, stretches, x_m,
    K: tl.constexpr, FIRST: tl.constexpr, LARGEST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (M, stretches): the K best of each stretch of BLOCK numbers of rows [M,W], best first -> `keys` and `places`
    [M,stretches,K].

    FIRST: x holds float32 numbers; later rounds have the keys of the round before, and their places in `names`.
    """
    row, stretch = tl.program_id(0).to(tl.int64), tl.program_id(1)
    w = stretch * BLOCK + tl.arange(0, BLOCK)
    if FIRST:
        key = _keys(tl.load(x + row * x_m + w, mask=w < W, other=0.0), LARGEST)
    else:
        key = tl.load(x + row * x_m + w, mask=w < W, other=LOWEST)
    key = tl.where(w < W, key, LOWEST)
    out = (row * stretches + stretch) * K
    for i in range(K):
        best = tl.max(key, 0)
        at = tl.min(tl.where(key == best, w, 2147483647), 0)
        place = at
        if not FIRST:
            place = tl.load(names + row * W + tl.minimum(at, W - 1))
        tl.store(keys + out + i, best)
        tl.store(places + out + i, place)
        key = tl.where(w == at, LOWEST, key)


VARIANTS = tuple(
    Variant(
        leading, {"*fp32" if first else "*i32": "x" if first else "x names keys places",
                  **({"*i32": "names keys places"} if first else {}), "i32": "W stretches x_m"},
        {"K": 8, "FIRST": first, "LARGEST": True, "BLOCK": 2048},
    )
    for first in (True, False)
)  # fmt: skip
