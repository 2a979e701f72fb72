"""The splits of attention, put together by their log-sum-exp."""

import triton
import triton.language as tl

from accel.lowering.triton.kernels import Variant
from accel.lowering.triton.kernels._scores import HIDDEN, NONE, finish


@triton.jit
def merge(
    partial, sums, sink, out, lse, rows, splits, heads,
    SINK: tl.constexpr, LSE: tl.constexpr, DV: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Grid (rows): the splits of one head of one token, `partial` [rows,splits,DV], -> out [rows,DV], `lse` [rows]."""
    row = tl.program_id(0).to(tl.int64)
    s, w = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_V)
    peaks = tl.load(sums + row * splits + s, mask=s < splits, other=NONE)
    totals = tl.load(sums + (rows + row) * splits + s, mask=s < splits, other=0.0)
    peak = tl.maximum(tl.max(peaks, 0), HIDDEN)  # finite
    share = tl.exp2(peaks - peak)
    at = partial + (row * splits + s)[:, None] * DV + w[None, :]
    parts = tl.load(at, mask=(s < splits)[:, None] & (w < DV)[None, :], other=0.0)
    acc = tl.sum(parts * share[:, None], 0)[None, :]
    total = tl.sum(totals * share, 0) + tl.zeros([1], tl.float32)
    beside = tl.load(sink + row % heads) if SINK else 0.0
    acc, found = finish(acc, peak + tl.zeros([1], tl.float32), total, beside, SINK)
    place = out + row * DV + w[None, :]
    tl.store(place, acc, mask=(w < DV)[None, :])
    if LSE:
        tl.store(lse + row + tl.zeros([1], tl.int64), found)


VARIANTS = tuple(
    Variant(
        merge, {"*fp32": "partial sums sink out lse", "i32": "rows splits heads"},
        {"SINK": sink, "LSE": sink, "DV": width, "BLOCK_S": 64, "BLOCK_V": width},
    )
    for width, sink in ((64, False), (128, True))
)  # fmt: skip
