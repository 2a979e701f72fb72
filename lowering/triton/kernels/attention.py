"""Attention in Triton: keys and values are read once for all queries of a group, and cut into splits.

One program takes a tile of queries (BLOCK_M rows: some tokens, each with the heads of its group side by
side) and one in so many blocks of BLOCK_N slots, of those that the tile may see at all. Prefill and decoding are
the same kernel: many tiles and one split, or one tile and as many splits as fill the device.
Scores are in base 2; sums, and what is kept of a split, are float32.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
NONE = tl.constexpr(float("-inf"))
LEAST = tl.constexpr(-3.4028234663852886e38)  # log-sum-exp of nothing
HIDDEN = tl.constexpr(-1e38)  # a bias that low hides


@triton.jit
def _sees(q_at, k_at, size, MASK: tl.constexpr, AHEAD: tl.constexpr = False):
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
def _finish(acc, peak, total, sink, SINK: tl.constexpr):
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


@triton.jit
def attend(
    q, k, v, k_scale, v_scale, q_pos, k_pos, bias, sink, tree, first, ends, starts, table, blocks, counts,
    out, lse, partial, sums,
    scale, cap, size, T, S, heads, groups, rows, width, distances, pages, listed, offset, splits,
    q_b, q_h, q_t, k_b, k_g, k_s, v_b, v_g, v_s, pos_b, pos_g, lists_g, tiles,
    MASK: tl.constexpr, BIAS: tl.constexpr, CAPPED: tl.constexpr, SINK: tl.constexpr,
    TREE: tl.constexpr, RAGGED: tl.constexpr, PAGE: tl.constexpr, FLAT: tl.constexpr, LSE: tl.constexpr,
    SCALED: tl.constexpr, LISTED: tl.constexpr, WHOLE: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    HEADS: tl.constexpr, TOKENS: tl.constexpr, PARTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (tiles, splits of this part, B·G·PARTS): HEADS heads of a group in each of PARTS, TOKENS tokens a tile.

    RAGGED: `ends` [B,G] are where the slots of each head end, which lie one head's after another's, S of a row in all.
    PAGE: slots lie in pages of so many, which rows share, k [pages,G,PAGE,D]: those of `table` [B,pages], -1: none.
    FLAT: the queries of all rows are one row, those of row b from `starts` [B+1] number b to number b + 1.
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
    scales = (b * groups + g) * S
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
        k_at = tl.load(positions + slot, mask=there, other=-1).to(tl.int32)[None, :]
        key_at, value_at, scale_at = slot * k_s, slot * v_s, scales + slot
        if PAGE:
            page = tl.load(table + b * pages + slot // PAGE, mask=there, other=-1)
            there = there & (page >= 0)
            page = tl.maximum(page, 0).to(tl.int64)
            key_at = page * k_b + (slot % PAGE) * k_s
            value_at = page * v_b + (slot % PAGE) * v_s
            scale_at = (page * groups + g) * PAGE + slot % PAGE
        key = tl.load(
            keys + key_at[:, None] + d[None, :],
            mask=there[:, None] & (d < D)[None, :], other=0,
        )  # fmt: skip
        value = tl.load(
            values + value_at[:, None] + w[None, :],
            mask=there[:, None] & (w < DV)[None, :], other=0,
        )  # fmt: skip
        score = tl.dot(queries, tl.trans(key.to(queries.dtype)), input_precision=PRECISION) * scale
        if SCALED:
            score = score * tl.load(k_scale + scale_at, mask=there, other=0.0)[None, :]
        if CAPPED:  # tanh in terms of exp
            score = cap - 2 * cap / (tl.exp(score * (2 / cap)) + 1)
        if BIAS == "distance":
            apart = tl.minimum(tl.maximum(q_at - k_at + distances, 0), width - 1)
            score += tl.load(bias + h[:, None] * width + apart, mask=real[:, None], other=0.0)
        if BIAS == "positions":
            place = tl.maximum(q_at, 0) * width + tl.maximum(k_at, 0)
            score += tl.load(
                bias + h.to(tl.int64)[:, None] * width * width + place,
                mask=real[:, None],
                other=0.0,
            )
        seen = _sees(q_at, k_at, size, MASK)
        if TREE:
            apart = (slot - own)[None, :]
            inside = (apart >= 0) & (apart < T)
            allowed = tl.load(
                tree + (b * T + t[:, None]) * T + apart, mask=inside & real[:, None], other=1
            )
            ahead = _sees(q_at, k_at, size, MASK, True)
            seen = tl.where(inside, ahead & (allowed != 0), seen)
        seen = seen & ~(score <= HIDDEN)  # NaN is seen
        score = tl.where(seen, score, NONE) * LOG2E
        top = tl.maximum(peak, tl.max(score, 1))
        safe = tl.where(top == NONE, 0.0, top)
        prob = tl.exp2(score - safe[:, None])
        shrink = tl.exp2(peak - safe)
        total = total * shrink + tl.sum(prob, 1)
        if SCALED:
            prob = prob * tl.load(v_scale + scale_at, mask=there, other=0.0)[None, :]
        acc = acc * shrink[:, None]
        acc += tl.dot(prob.to(queries.dtype), value.to(queries.dtype), input_precision=PRECISION)
        peak = top

    row = (begin + t) * heads + h
    if WHOLE:
        beside = tl.load(sink + h, mask=real, other=0.0) if SINK else 0.0
        peak = tl.where(peak == NONE, HIDDEN, peak)
        acc, found = _finish(acc, peak, total, beside, SINK)
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
    acc, found = _finish(acc, peak + tl.zeros([1], tl.float32), total, beside, SINK)
    place = out + row * DV + w[None, :]
    tl.store(place, acc, mask=(w < DV)[None, :])
    if LSE:
        tl.store(lse + row + tl.zeros([1], tl.int64), found)
