"""How much attention each slot draws (`ir.ops.mass.drawn_attention`): sums of probabilities over queries and heads.

The log-sum-exp of every query is known; a program takes BLOCK_N slots of a KV head and all queries one after another,
so each key is read once and no matrix of probabilities is written.
"""

import triton
import triton.language as tl

from accel.lowering.triton.kernels import Variant
from accel.lowering.triton.kernels._scores import HIDDEN, LOG2E, scores
from accel.lowering.triton.kernels._stored import stored


@triton.jit
def draw(
    q, k, k_scale, k_more, k_least, k_finer, coarse, q_pos, k_pos, bias, tree, first, lse, share, out,
    scale, cap, size, T, S, heads, groups, width, distances, offset, every,
    q_b, q_h, q_t, k_b, k_g, k_s, pos_b, pos_g,
    MASK: tl.constexpr, BIAS: tl.constexpr, CAPPED: tl.constexpr, TREE: tl.constexpr, D: tl.constexpr,
    K_SCALED: tl.constexpr, K_KIND: tl.constexpr, K_BITS: tl.constexpr, K_GROUP: tl.constexpr, K_ROWS: tl.constexpr,
    K_FINER: tl.constexpr, HEADS: tl.constexpr, TOKENS: tl.constexpr, PARTS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of slots, B·G): the queries' log-sum-exp `lse` [B,T,H] and their shares [B,T] -> the slots from
    `offset` on of `out` [B,G,every].
    """
    row_of = tl.program_id(1)
    b, g = (row_of // groups).to(tl.int64), row_of % groups
    slot = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    there = slot < S
    m, d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    own = 0
    if TREE:
        own = tl.load(first + b).to(tl.int32)
    keys = k + b * k_b + g.to(tl.int64) * k_g
    k_at = tl.load(k_pos + b * pos_b + g * pos_g + slot, mask=there, other=-1).to(tl.int32)[None, :]
    key = stored(
        keys, k_more, k_least, k_finer, coarse, slot * k_s, slot, d, there, row_of, g, S,
        D, K_KIND, K_BITS, K_GROUP, K_ROWS, K_FINER,
    )  # fmt: skip
    key = tl.trans(key.to(tl.float32))
    total = tl.zeros([BLOCK_N], tl.float32)
    for tile in range(0, tl.cdiv(T, TOKENS) * PARTS):
        t = (tile // PARTS) * TOKENS + m // HEADS
        inner = (tile % PARTS) * HEADS + m % HEADS
        h = g * (heads // groups) + inner
        real = (m < TOKENS * HEADS) & (t < T) & (inner < heads // groups)
        heads_at = q + b * q_b + h * q_h + t * q_t
        queries = tl.load(
            heads_at[:, None] + d[None, :], mask=real[:, None] & (d < D)[None, :], other=0.0
        )
        q_at = tl.load(q_pos + b * T + t, mask=real, other=-1).to(tl.int32)[:, None]
        score = tl.dot(queries.to(tl.float32), key, input_precision=PRECISION) * scale
        if K_SCALED:
            by_slot = tl.load(k_scale + row_of * S + slot, mask=there, other=0.0)
            score = score * by_slot[None, :]
        score = scores(
            score, q_at, k_at, slot, h, t, real, bias, tree, b, own, T, cap, size, width, distances,
            MASK, BIAS, CAPPED, TREE,
        )  # fmt: skip
        whole = tl.load(lse + (b * T + t) * heads + h, mask=real, other=0.0)
        whole = tl.where(whole <= HIDDEN, 0.0, whole)
        weight = tl.load(share + b * T + t, mask=real, other=0.0)
        total += tl.sum(tl.exp2(score - (whole * LOG2E)[:, None]) * weight[:, None], 0)
    tl.store(out + row_of.to(tl.int64) * every + offset + slot, total, mask=there)


def _variant(tokens: int, width: int, types: str = "*fp32", **more: object) -> Variant:
    constants = {
        "MASK": "causal", "BIAS": "", "CAPPED": False, "TREE": False, "D": width, "K_SCALED": False, "K_KIND": "",
        "K_BITS": 8, "K_GROUP": 1, "K_ROWS": 1, "K_FINER": False, "HEADS": 4, "TOKENS": tokens, "PARTS": 1,
        "BLOCK_M": 4 * tokens, "BLOCK_N": 64 if width <= 64 else 32, "BLOCK_D": width, "PRECISION": "tf32x3",
    }  # fmt: skip
    more_of = "*fp16" if "K_KIND" in more else "*fp32"
    found = {
        "*fp32": "q k_scale bias lse share out k_finer", "*i64": "q_pos k_pos first", "*u8": "tree coarse",
        "fp32": "scale cap",
        "i32": "size T S heads groups width distances offset every q_b q_h q_t k_b k_g k_s pos_b pos_g",
    }  # fmt: skip
    for kind, names in ((types, "k"), (more_of, "k_more k_least")):
        found[kind] = f"{found.get(kind, '')} {names}"
    return Variant(draw, found, constants | more, 4, 1)


VARIANTS = (
    _variant(8, 64),
    _variant(4, 128, "*i8", K_SCALED=True, BIAS="distance", CAPPED=True, TREE=True),
    _variant(8, 64, "*u8", K_KIND="rows", K_BITS=4, K_GROUP=32, K_ROWS=128),
)
