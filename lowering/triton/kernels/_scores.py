"""What the kernels of attention share: masks, scores in base 2, and the end of a softmax."""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
NONE = tl.constexpr(float("-inf"))
LEAST = tl.constexpr(-3.4028234663852886e38)  # log-sum-exp of nothing
HIDDEN = tl.constexpr(-1e38)  # a bias that low hides


@triton.jit
def sees(q_at, k_at, size, MASK: tl.constexpr, AHEAD: tl.constexpr = False):
    """Mask.visible: q_at [M,1] and k_at [1,N] -> [M,N]."""
    seen = k_at >= 0
    if AHEAD or MASK == "full":
        seen = seen & (q_at == q_at)
    else:
        seen = seen & (k_at <= q_at)
    if MASK == "window":
        seen = seen & (k_at > q_at - size)
    if MASK == "chunk":
        seen = seen & (tl.maximum(q_at, 0) // size == tl.maximum(k_at, 0) // size)
    return seen


@triton.jit
def scores(
    score, q_at, k_at, slot, h, t, real, bias, tree, b, start, T, cap, size, width, distances,
    MASK: tl.constexpr, BIAS: tl.constexpr, CAPPED: tl.constexpr, TREE: tl.constexpr,
):  # fmt: skip
    """What the softmax is taken of [M,N], times log2(e), of scaled products `score`; -inf where a row sees nothing."""
    if CAPPED:  # tanh in terms of exp
        score = cap - 2 * cap / (tl.exp(score * (2 / cap)) + 1)
    if BIAS == "distance":
        apart = tl.minimum(tl.maximum(q_at - k_at + distances, 0), width - 1)
        score += tl.load(bias + h[:, None] * width + apart, mask=real[:, None], other=0.0)
    if BIAS == "positions":
        place = tl.maximum(q_at, 0) * width + tl.maximum(k_at, 0)
        at = h.to(tl.int64)[:, None] * width * width + place
        score += tl.load(bias + at, mask=real[:, None], other=0.0)
    seen = sees(q_at, k_at, size, MASK)
    if TREE:
        apart = (slot - start)[None, :]
        inside = (apart >= 0) & (apart < T)
        allowed = tl.load(
            tree + (b * T + t[:, None]) * T + apart, mask=inside & real[:, None], other=1
        )
        ahead = sees(q_at, k_at, size, MASK, True)
        seen = tl.where(inside, ahead & (allowed != 0), seen)
    seen = seen & ~(score <= HIDDEN)  # NaN is seen
    return tl.where(seen, score, NONE) * LOG2E


@triton.jit
def finish(acc, peak, total, sink, SINK: tl.constexpr):
    """What a row of queries gets, out of its sums: 0 where it saw nothing; and the log of its sum of exp(score)."""
    if SINK:
        top = tl.maximum(peak, sink * LOG2E)
        shrink = tl.exp2(peak - top)
        total = total * shrink + tl.exp2(sink * LOG2E - top)
        acc = acc * shrink[:, None]
        peak = top
    some = tl.where(total == 0, 1, total)
    lse = tl.where(total == 0, LEAST, (peak + tl.log2(some)) / LOG2E)
    return acc / tl.where(total > 0, total, 1)[:, None], lse
