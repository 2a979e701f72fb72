"""Attention in Triton: keys and values are read once for all queries of a group, and cut into splits.

One program takes a tile of queries (BLOCK_M rows: some tokens, each with the heads of its group side by
side) and one in so many blocks of BLOCK_N slots, of those that the tile may see at all. Prefill and decoding are
the same kernel: many tiles and one split, or one tile and as many splits as fill the device.
Scores are in base 2; sums, and what is kept of a split, are float32.
"""

import triton
import triton.language as tl

from accel.lowering.triton.kernels import Variant
from accel.lowering.triton.kernels._scores import HIDDEN, NONE, finish, scores
from accel.lowering.triton.kernels._stored import stored


@triton.jit
def attend(
    q, k, v, k_scale, v_scale, k_more, v_more, k_least, v_least, k_finer, v_finer, coarse,
    q_pos, k_pos, bias, sink, tree, first, ends, starts, table, chosen, blocks, counts,
    out, lse, partial, sums,
    scale, cap, size, T, S, heads, groups, rows, width, distances, pages, picks, listed, offset,
    q_b, q_h, q_t, k_b, k_g, k_s, v_b, v_g, v_s, pos_b, pos_g, lists_g, tiles, splits,
    MASK: tl.constexpr, BIAS: tl.constexpr, CAPPED: tl.constexpr, SINK: tl.constexpr,
    TREE: tl.constexpr, RAGGED: tl.constexpr, PAGE: tl.constexpr, FLAT: tl.constexpr, LSE: tl.constexpr,
    CHOSEN: tl.constexpr, LISTED: tl.constexpr, WHOLE: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    K_SCALED: tl.constexpr, K_KIND: tl.constexpr, K_BITS: tl.constexpr, K_GROUP: tl.constexpr, K_ROWS: tl.constexpr,
    K_FINER: tl.constexpr, V_SCALED: tl.constexpr, V_KIND: tl.constexpr, V_BITS: tl.constexpr, V_GROUP: tl.constexpr,
    V_ROWS: tl.constexpr, V_FINER: tl.constexpr,
    HEADS: tl.constexpr, TOKENS: tl.constexpr, PARTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (tiles, splits of this part, B·G·PARTS): HEADS heads of a group in each of PARTS, TOKENS tokens a tile.

    RAGGED: `ends` [B,G] are where the slots of each head end, which lie one head's after another's, S of a row in all.
    CHOSEN: tiles are of one token, which reads stretches of so many slots: `chosen` [B,G,T,picks], -1: none.
    PAGE: slots lie in pages of so many, which rows share, k [pages,G,PAGE,D]: those of `table` [B,pages], -1: none.
    FLAT: the queries of all rows are one row, those of row b from `starts` [B+1] number b to number b + 1.
    K_SCALED, V_SCALED: products and probabilities are scaled by slot, `k_scale` and `v_scale` [B,G,S]. K_KIND, V_KIND
    and what belongs to them: see `stored`; V_KIND "none": values are not read, `out` is not written.
    WHOLE: this is all there is, and `out` [B,T,H,DV] is written, with LSE `lse` [B,T,H], too; else split `offset` +
    number of `splits` goes to `partial` [B·T·H,splits,DV] and its peak and total to `sums` [2,B·T·H,splits].
    """
    tile, split, where = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    b = (where // (groups * PARTS)).to(tl.int64)
    g = (where // PARTS) % groups

    begin = b * T  # of the row's queries among all
    tokens = T
    if FLAT:
        begin = tl.load(starts + b)
        tokens = (tl.load(starts + b + 1) - begin).to(tl.int32)

    m = tl.arange(0, BLOCK_M)
    t = tile * TOKENS + m // HEADS
    inner = (where % PARTS) * HEADS + m % HEADS  # among the heads of the group
    h = g * (heads // groups) + inner
    real = (m < TOKENS * HEADS) & (t < tokens) & (inner < heads // groups)
    n = tl.arange(0, BLOCK_N)
    d, w = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)

    heads_at = q + b * q_b + h * q_h + t * q_t
    if FLAT:
        heads_at = q + h * q_h + (begin + t) * q_t
    queries = tl.load(
        heads_at[:, None] + d[None, :], mask=real[:, None] & (d < D)[None, :], other=0.0
    )
    q_at = tl.load(q_pos + begin + t, mask=real, other=-1).to(tl.int32)[:, None]
    own = 0
    if TREE:
        own = tl.load(first + b).to(tl.int32)
    keys = k + g.to(tl.int64) * k_g
    values = v + g.to(tl.int64) * v_g
    if not PAGE:
        keys += b * k_b
        values += b * v_b
    positions = k_pos + b * pos_b + g * pos_g
    row_of = b * groups + g
    scales = row_of * S
    slots = S
    if RAGGED:
        start = tl.load(ends + b * groups + g - 1, mask=g > 0, other=0)
        slots = (tl.load(ends + b * groups + g) - start).to(tl.int32)
        keys += start * k_s
        values += start * v_s
        positions += start
        scales = b * S + start
    lists = (b * (lists_g * (groups - 1) + 1) + g * lists_g) * tiles + tile

    peak = tl.full([BLOCK_M], NONE, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    count = listed
    if RAGGED:
        count = tl.cdiv(slots, BLOCK_N)
    if LISTED:
        count = tl.load(counts + lists)
    for i in range(split, count, tl.num_programs(1)):
        block = i
        if LISTED:
            block = tl.load(blocks + lists * listed + i)
        slot = block * BLOCK_N + n
        there = slot < slots
        if CHOSEN:
            pick = (row_of * T + tile) * picks + slot // CHOSEN
            page = tl.load(chosen + pick, mask=slot < picks * CHOSEN, other=-1).to(tl.int32)
            slot = page * CHOSEN + slot % CHOSEN
            there = (page >= 0) & (slot < slots)
            slot = tl.where(there, slot, 0)
        k_at = tl.load(positions + slot, mask=there, other=-1).to(tl.int32)[None, :]
        key_at, value_at, scale_at = slot * k_s, slot * v_s, scales + slot
        if PAGE:
            page = tl.load(table + b * pages + slot // PAGE, mask=there, other=-1)
            there = there & (page >= 0)
            page = tl.maximum(page, 0).to(tl.int64)
            key_at = page * k_b + (slot % PAGE) * k_s
            value_at = page * v_b + (slot % PAGE) * v_s
            scale_at = (page * groups + g) * PAGE + slot % PAGE
        key = stored(
            keys, k_more, k_least, k_finer, coarse, key_at, slot, d, there, row_of, g, slots,
            D, K_KIND, K_BITS, K_GROUP, K_ROWS, K_FINER,
        )  # fmt: skip
        score = tl.dot(queries, tl.trans(key.to(queries.dtype)), input_precision=PRECISION) * scale
        if K_SCALED:
            score = score * tl.load(k_scale + scale_at, mask=there, other=0.0)[None, :]
        score = scores(
            score, q_at, k_at, slot, h, t, real, bias, tree, b, own, T, cap, size, width, distances,
            MASK, BIAS, CAPPED, TREE,
        )  # fmt: skip
        top = tl.maximum(peak, tl.max(score, 1))
        safe = tl.where(top == NONE, 0.0, top)
        prob = tl.exp2(score - safe[:, None])
        shrink = tl.exp2(peak - safe)
        total = total * shrink + tl.sum(prob, 1)
        if V_KIND != "none":
            value = stored(
                values, v_more, v_least, v_finer, coarse, value_at, slot, w, there, row_of, g, slots,
                DV, V_KIND, V_BITS, V_GROUP, V_ROWS, V_FINER,
            )  # fmt: skip
            if V_SCALED:
                prob = prob * tl.load(v_scale + scale_at, mask=there, other=0.0)[None, :]
            acc = acc * shrink[:, None]
            acc += tl.dot(
                prob.to(queries.dtype), value.to(queries.dtype), input_precision=PRECISION
            )
        peak = top

    row = (begin + t) * heads + h
    if WHOLE:
        beside = tl.load(sink + h, mask=real, other=0.0) if SINK else 0.0
        peak = tl.where(peak == NONE, HIDDEN, peak)
        acc, found = finish(acc, peak, total, beside, SINK)
        if V_KIND != "none":
            place = out + row[:, None] * DV + w[None, :]
            tl.store(place, acc, mask=real[:, None] & (w < DV)[None, :])
        if LSE:
            tl.store(lse + row, found, mask=real)
    else:
        at = row * splits + offset + split
        place = partial + at[:, None] * DV + w[None, :]
        tl.store(place, acc, mask=real[:, None] & (w < DV)[None, :])
        tl.store(sums + at, peak, mask=real)
        tl.store(sums + rows * splits + at, total, mask=real)


_TYPES = {
    "*fp32": "q k v k_scale v_scale k_more v_more k_least v_least k_finer v_finer bias sink out lse partial sums",
    "*i64": "q_pos k_pos first ends starts table chosen", "*u8": "tree coarse", "*i32": "blocks counts",
    "fp32": "scale cap",
    "i32": "size T S heads groups rows width distances pages picks listed offset q_b q_h q_t k_b k_g k_s "
    "v_b v_g v_s pos_b pos_g lists_g tiles splits",
}  # fmt: skip


def _variant(
    tokens: int,
    width: int,
    mask: str,
    stages: int = 2,
    types: str = "",
    since: int = 80,
    warps: int = 4,
    **more: object,
) -> Variant:
    """Of four heads to a group; `types`: further operands by type, as "*u8 k v; *fp16 k_more"."""
    own = dict(part.split(maxsplit=1) for part in types.split("; ") if part)
    moved = {name for names in own.values() for name in names.split()}
    found = {t: " ".join(n for n in names.split() if n not in moved) for t, names in _TYPES.items()}
    found |= {t: f"{found.get(t, '')} {names}" for t, names in own.items()}
    store = {"SCALED": False, "KIND": "", "BITS": 8, "GROUP": 1, "ROWS": 1, "FINER": False}
    constants = {
        "MASK": mask, "BIAS": "", "CAPPED": False, "SINK": False, "TREE": False, "RAGGED": False, "PAGE": 0,
        "FLAT": False, "LSE": False, "CHOSEN": 0, "LISTED": True, "WHOLE": False, "D": width, "DV": width,
        **{f"{side}_{name}": value for side in "KV" for name, value in store.items()},
        "HEADS": 4, "TOKENS": tokens, "PARTS": 1, "BLOCK_M": max(16, 4 * tokens),
        "BLOCK_N": 64 if width <= 64 else 32, "BLOCK_D": width, "BLOCK_V": width, "PRECISION": "tf32x3",
    }  # fmt: skip
    return Variant(attend, found, constants | more, warps, stages, since)


VARIANTS = (
    _variant(1, 128, "causal"),
    _variant(8, 64, "window", 2, WHOLE=True, FLAT=True),
    _variant(16, 64, "window", 2, since=90, WHOLE=True),
    _variant(
        5, 64, "chunk", types="*i8 k v", K_SCALED=True, V_SCALED=True, CAPPED=True, SINK=True, TREE=True,
        BIAS="distance", LSE=True, BLOCK_M=32,
    ),
    _variant(1, 64, "causal", types="*i8 k v", K_SCALED=True, V_SCALED=True, PAGE=16, LISTED=False),
    _variant(2, 32, "full", BIAS="positions", RAGGED=True, LISTED=False),
    _variant(1, 64, "causal", types="*fp16 k v", CHOSEN=16, LISTED=False),
    _variant(
        1, 128, "causal", types="*u8 k v; *fp16 k_more v_more k_least v_least", LISTED=False,
        K_KIND="rows", K_BITS=4, K_GROUP=32, K_ROWS=128, V_KIND="channels", V_BITS=4, V_GROUP=32, V_ROWS=128,
    ),
    _variant(
        8, 64, "causal", types="*u8 k v k_finer v_finer; *fp16 k_more v_more k_least v_least", LISTED=False,
        K_KIND="rows", K_BITS=4, K_GROUP=128, K_ROWS=128, V_KIND="channels", V_BITS=4, V_GROUP=64, V_ROWS=128,
        K_FINER=True, V_FINER=True,
    ),
    _variant(1, 64, "causal", types="*u8 k v", K_KIND="static", K_BITS=4, V_KIND="table", V_SCALED=True),
    _variant(8, 64, "causal", V_KIND="none", WHOLE=True, LSE=True),
    # what is measured beside these
    _variant(1, 128, "causal", warps=2),
    _variant(1, 128, "causal", 1),
    _variant(8, 64, "window", warps=8, WHOLE=True),
    _variant(16, 64, "window", since=90, warps=8, WHOLE=True),
    _variant(8, 128, "causal", 1, warps=8),
    _variant(1, 64, "causal", types="*i8 k v", warps=2, K_SCALED=True, V_SCALED=True),
    _variant(
        1, 128, "causal", types="*u8 k v; *fp16 k_more v_more k_least v_least", warps=2, LISTED=False,
        K_KIND="rows", K_BITS=4, K_GROUP=32, K_ROWS=128, V_KIND="channels", V_BITS=4, V_GROUP=32, V_ROWS=128,
    ),
)  # fmt: skip
