"""Which keys a segment of a prompt reads, against loops over keys and queries that follow each paper."""

import math

import numpy as np
import pytest
import torch

from accel.ir.axis import find_axes
from accel.ir.ops.attention import Form
from accel.ir.tables import Observed
from accel.passes.prefill.sparse._inputs import diagonals, share_before
from accel.passes.prefill.sparse._segment import chosen, gather
from accel.passes.prefill.sparse.minference import PATTERNS

AXIS = find_axes()["prefill.sparse"]
NAMES = AXIS.names()
SCALE, SEGMENT, BLOCK, FIRST, SLOTS = 0.5, 16, 4, 64, 83
FORM = Form("causal", scale=SCALE)
BLOCKS = FIRST // BLOCK


def method(name, **options):
    sizes = {"segment": SEGMENT, "block": BLOCK, "budget": 32, "threshold": 32}
    return AXIS.build(name, **{**AXIS.small(name), **sizes, **options})


def tensors(seed=0, scale=1.0):
    """Queries [1,4,16,8] of a segment at slot 64, keys [1,2,83,8], positions."""
    torch.manual_seed(seed)
    q, k = torch.randn(1, 4, SEGMENT, 8) * scale, torch.randn(1, 2, SLOTS, 8)
    number = torch.arange(SLOTS)[None]
    return q, k, number.where(number < FIRST + SEGMENT, -1)


def slots_of(how, q, k, pos):
    slots, _ = chosen(how, q, k, pos, torch.tensor([FIRST]), FORM)
    return slots[0]


def read(how, q, k, pos):
    """Earlier slots that each group reads: a set per group; no slot twice."""
    found = [[s for s in row.tolist() if s >= 0] for row in slots_of(how, q, k, pos)]
    assert all(len(set(row)) == len(row) and max(row, default=0) < FIRST for row in found)
    return [set(row) for row in found]


def keys_of(blocks):
    return {b * BLOCK + i for b in blocks for i in range(BLOCK)}


def attention(q, k, h, last):
    """softmax rows [last][S] of head h over the keys that the query sees."""
    rows = []
    for w in range(SEGMENT - last, SEGMENT):
        see = FIRST + w + 1
        logits = (q[0, h, w] @ k[0, h // 2, :see].T) * SCALE
        rows.append(logits.softmax(0).tolist() + [0.0] * (FIRST + SEGMENT - see))
    return rows


@pytest.mark.parametrize("name", NAMES)
def test_a_nan_is_read_or_not_but_changes_no_other_head(name):
    q, k, pos = tensors()
    how = method(name)
    want = slots_of(how, q, k, pos)
    for broken in (q[:, 2:], k[:, 1:]):
        broken[..., 3, 2] = torch.nan
    got = slots_of(how, q, k, pos)
    shared = bool((want == want[:1]).all())  # one list of all heads is changed for all
    assert shared or torch.equal(got[0], want[0])
    assert got.max() < FIRST
    k[:, 1:] = torch.nan
    assert slots_of(how, q, k, pos).max() < FIRST


@pytest.mark.parametrize("name", NAMES)
def test_equal_keys_are_chosen_as_well_as_any(name):
    q, _, pos = tensors()
    k = torch.ones(1, 2, SLOTS, 8)
    for row in read(method(name), q, k, pos):
        assert 0 < len(row) <= 32


@pytest.mark.parametrize("name", NAMES)
def test_the_segment_and_what_it_chose_are_read_in_one_attention(name):
    """The union, gathered, against attention of each query over the same slots by a mask."""
    q, k, pos = tensors()
    v = torch.randn(1, 2, SLOTS, 8)
    how = method(name)
    found = gather(how, FORM, False)(q, k, pos, torch.tensor([FIRST]), v)
    earlier = read(how, q, k, pos)
    for h in range(4):
        g = h // 2
        keys = torch.cat((found["old"][0, g], found["own"][0, g]))
        values = torch.cat((found["old_v"][0, g], found["own_v"][0, g]))
        where = torch.cat((found["old_pos"][0, g], found["own_pos"][0]))
        for i in range(SEGMENT):
            seen = (where >= 0) & (where <= FIRST + i)
            got = (q[0, h, i] @ keys[seen].T * SCALE).softmax(0) @ values[seen]
            mine = sorted(earlier[g]) + list(range(FIRST, FIRST + i + 1))
            want = (q[0, h, i] @ k[0, g, mine].T * SCALE).softmax(0) @ v[0, g, mine]
            assert torch.allclose(got, want, atol=1e-5)


def test_sums_along_diagonals_are_those_of_a_loop():
    rows = torch.rand(2, 3, 7)
    got = diagonals(rows)
    assert got.shape == (2, 9)
    for c in range(9):  # the last query reads slot c, the one i before it slot c - i
        want = sum(rows[:, 2 - i, c - i] for i in range(3) if 0 <= c - i < 7)
        assert torch.allclose(got[:, c], torch.as_tensor(want))


def test_the_share_before_an_entry_is_that_of_a_loop():
    weights = torch.tensor([0.1, 0.4, 0.1, 0.25, 0.15])
    got = share_before(weights)
    assert torch.allclose(got, torch.tensor([0.8, 0.0, 0.9, 0.4, 0.65]), atol=1e-6)


# ---- tri-shape


@pytest.mark.parametrize("sinks", [0, 4, 6, 32])
def test_tri_shape_reads_sinks_and_the_newest(sinks):
    q, k, pos = tensors()
    first = -(-sinks // BLOCK)
    window = 32 // BLOCK - first
    want = keys_of([*range(first), *range(BLOCKS - window, BLOCKS)])
    got = read(method("tri-shape", sinks=sinks), q, k, pos)
    assert got == [want, want]
    # StreamingLLM's mask of that window, on every query of the segment
    for i in range(FIRST, FIRST + SEGMENT):
        mask = {j for j in range(FIRST) if j < sinks or i - j < window * BLOCK}
        assert mask <= want
    if sinks:
        assert read(method("tri-shape", sinks=0), q, k, pos)[0] != want  # the control


# ---- minference


def lines(q, k, g, last):
    """Of a group: vertical sums by slot, slash sums by distance."""
    vertical, slash = [0.0] * (FIRST + SEGMENT), {}
    for h in (2 * g, 2 * g + 1):
        for w, row in enumerate(attention(q, k, h, last)):
            for j, share in enumerate(row):
                vertical[j] += share
                distance = FIRST + SEGMENT - last + w - j
                slash[distance] = slash.get(distance, 0.0) + share
    return vertical, slash


@pytest.mark.parametrize("seed", range(3))
def test_minference_reads_the_best_columns_and_the_blocks_of_the_best_distances(seed):
    q, k, pos = tensors(seed, 2.0)
    how = method("minference", budget=40, columns=8, observe=4, sinks=2, near=3)
    got = read(how, q, k, pos)
    for g in range(2):
        vertical, slash = lines(q, k, g, 4)
        ranked = sorted(slash, key=lambda o: -(slash[o] + (o < 3) * 1e6))
        blocks: list[int] = []
        cut = set()
        for distance in ranked:
            if distance < 0:
                continue
            crossed = {(i - distance) // BLOCK for i in range(FIRST, FIRST + SEGMENT)}
            new = sorted(b for b in crossed - set(blocks) if 0 <= b < BLOCKS)
            if len(blocks) + len(new) > 8:
                cut = set(new)  # the last distance is cut
                break
            blocks += new
        assert len(got[g]) == 40
        whole = {s // BLOCK for s in got[g] if keys_of([s // BLOCK]) <= got[g]}
        assert set(blocks) <= whole and len(blocks) >= 5
        # the rest of the blocks are of the distance that was cut, then single columns
        extra = [b for b in sorted(whole - set(blocks)) if b in cut]
        best = set(blocks) | set(extra)
        single = sorted(
            set(range(FIRST)) - keys_of(best), key=lambda j: -(vertical[j] + (j < 2) * 1e6)
        )
        assert got[g] - keys_of(best) <= set(single[:8])
        assert {0, 1} <= got[g]


def test_minference_without_a_rounded_end_would_miss_a_distance():
    """A diagonal that crosses into a block by its last keys: the broken form takes aligned blocks of distances."""
    from accel.passes.prefill.sparse.minference import crossed

    for c in range(FIRST + SEGMENT):
        slash = torch.zeros(1, 1, FIRST + SEGMENT + 3)
        slash[..., c] = 1
        got = crossed(slash, (FIRST + SEGMENT) // BLOCK, BLOCK, SEGMENT)[0, 0]
        want = {(c - i) // BLOCK for i in range(SEGMENT) if c >= i}
        assert set(got.nonzero()[:, 0].tolist()) == want
        aligned = {c // BLOCK - i for i in range(SEGMENT // BLOCK) if c // BLOCK >= i}
        assert (aligned == want) == (c % BLOCK == BLOCK - 1 or c < SEGMENT)  # the control


def test_minference_of_all_columns_reads_all():
    q, k, pos = tensors()
    for columns in (60, 4):
        how = method("minference", budget=FIRST, columns=columns, observe=4)
        assert read(how, q, k, pos) == [set(range(FIRST))] * 2


def test_minference_s_other_patterns_by_hand():
    q, k, pos = tensors(1, 2.0)
    how = method("minference", budget=24, columns=8, observe=4, sinks=2)
    by_line = read(how, q, k, pos)
    got = read(how._with([1, 2]), q, k, pos)
    assert got[0] == {*range(8), *keys_of(range(BLOCKS - 4, BLOCKS))}
    means = [k[0, 1, b * BLOCK : (b + 1) * BLOCK].mean(0) for b in range(BLOCKS)]
    rows = [q[0, h, i : i + BLOCK].mean(0) for h in (2, 3) for i in range(0, SEGMENT, BLOCK)]
    worth = [max(float(row @ mean) for row in rows) for mean in means]
    assert got[1] == keys_of(sorted(range(BLOCKS), key=lambda b: -worth[b])[:4])
    assert got[0] != by_line[0] and got[1] != by_line[1], "the control"
    assert read(how._with([0, 0]), q, k, pos) == by_line


def told(kind, length=80, width=8):
    """What attention reads of a row whose last segment attends as one pattern says; alike in both KV heads."""
    torch.manual_seed(0)
    keys, queries = torch.randn(length, width) * 0.1, torch.zeros(length, width)
    if kind == "vertical-slash":  # one key, whose neighbours point the other way
        keys[16:24] = -30.0
        keys[20] = 30.0
        queries[:] = 1.0
    elif kind == "A-shape":  # every other one of the newest keys; the last queries do not look
        keys[56:64, 0] = torch.tensor([20.0, -20.0]).repeat(4)
        keys[20, 1], queries[:-4, 0], queries[-4:, 1] = 30.0, 1.0, 1.0
    else:  # a block that the last queries do not look at
        keys[24:28], queries[:-4] = 20.0, 1.0
    values = torch.randn(length, width)
    return Observed(
        queries.expand(1, 4, -1, -1), keys.expand(1, 2, -1, -1), values.expand(1, 2, -1, -1), FORM
    )


@pytest.mark.parametrize("kind", PATTERNS)
def test_minference_finds_the_pattern_of_a_head(kind):
    how = method("minference", budget=16, columns=4, observe=4, sinks=2, near=2)
    apart = how.apart(told(kind))
    assert [PATTERNS[i] for i in apart.argmin(0)] == [kind] * 2, apart
    assert apart.amin() < 0.5 * apart.sort(0).values[1].min(), apart


@pytest.mark.parametrize(
    ("length", "options"),
    [
        (80, {"budget": 16, "columns": 16}),  # no block beside the columns
        (20, {"budget": 16, "columns": 16}),
        (40, {"segment": 60, "block": 20, "budget": 60, "columns": 40, "observe": 60}),
    ],
)
def test_minference_searches_with_any_sizes_that_a_recipe_may_have(length, options):
    """In rows that are too short, halves of them need not be whole blocks."""
    how = method("minference", sinks=2, near=2, **options)
    assert how.apart(told("block-sparse", length)).shape == (len(PATTERNS), 2)


# ---- pbs-attn


def pbs(q, k, g, share, observe, segment=SEGMENT):
    """Blocks that any head and block of queries of a group needs, and their keys, as the paper's steps say."""
    order: list[int] = []
    for start in range(0, FIRST, segment):
        worth = np.zeros(segment)
        for h in (2 * g, 2 * g + 1):
            logits = q[0, h, -observe:] @ k[0, g, :FIRST].T * SCALE
            worth += logits.softmax(-1).sum(0)[start : start + segment].numpy()
        order += [start + int(i) for i in np.argsort(-worth, kind="stable")]
    blocks = [order[b * BLOCK : (b + 1) * BLOCK] for b in range(BLOCKS)]
    needed = {b for b in range(BLOCKS) if 0 in blocks[b]}
    for h in (2 * g, 2 * g + 1):
        for at in range(0, SEGMENT, BLOCK):
            mean = q[0, h, at : at + BLOCK].mean(0)
            logits = torch.stack([mean @ k[0, g, b].mean(0) * SCALE for b in blocks])
            weights = logits.softmax(0).tolist()
            total = 0.0
            for b in sorted(range(BLOCKS), key=lambda b: -weights[b]):
                if total >= share:
                    break
                needed.add(b)
                total += weights[b]
    return {s for b in needed for s in blocks[b]}


@pytest.mark.parametrize("share", [0.2, 0.5, 0.9])
def test_pbs_attn_reads_the_blocks_of_sorted_keys_that_hold_the_share(share):
    q, k, pos = tensors(1, 3.0)
    got = read(method("pbs-attn", budget=FIRST, share=share, observe=4), q, k, pos)
    want = [pbs(q, k, g, share, 4) for g in range(2)]
    assert got == want and all(0 in row for row in got)
    plain = [pbs(q, k, g, share, 4, segment=BLOCK) for g in range(2)]
    assert got != plain or share == 0.9  # the control: keys in the prompt's order


def test_pbs_attn_of_all_of_the_share_reads_all_and_less_with_less():
    q, k, pos = tensors(1, 3.0)
    found = [
        read(method("pbs-attn", budget=FIRST, share=share, observe=4), q, k, pos)
        for share in (0.1, 0.3, 0.6, 1.0)
    ]
    assert found[-1] == [set(range(FIRST))] * 2
    sizes = [[len(row) for row in rows] for rows in found]
    assert sizes == sorted(sizes) and sizes[0] < sizes[-1]
    few = read(method("pbs-attn", budget=8, share=0.9, observe=4), q, k, pos)
    assert all(len(row) == 8 and 0 in row for row in few)


def test_segments_of_one_block_have_no_order():
    """Sorting inside a block changes nothing, across blocks it does."""
    q, k, pos = tensors(2, 3.0)
    q = q[:, :, :BLOCK]
    how = AXIS.build("pbs-attn", segment=BLOCK, block=BLOCK, budget=16, threshold=16, observe=4)
    before = [{s // BLOCK for s in row} for row in read(how, q, k, pos)]
    swapped = k.clone()
    swapped[:, :, 20:24] = k[:, :, 20:24].flip(2)
    assert [{s // BLOCK for s in row} for row in read(how, q, swapped, pos)] == before
    assert all(len(row) % BLOCK == 0 for row in read(how, q, k, pos))


# ---- flexprefill


def flex(q, k, g, share, tau, least, observe=4):
    """Blocks of a group, as the paper's steps say, the queries being those of one segment."""
    total = (FIRST + SEGMENT) // BLOCK
    own = SEGMENT // BLOCK
    needed, kinds = {0}, []
    means = torch.stack([k[0, g, b * BLOCK : (b + 1) * BLOCK].mean(0) for b in range(total)])
    for h in (2 * g, 2 * g + 1):
        rows = attention(q, k, h, observe)
        vertical = np.array(rows).mean(0)
        slash = np.zeros(FIRST + SEGMENT)  # by the slot that the last query reads on it
        for w, row in enumerate(rows):
            for j, x in enumerate(row):
                at = j + observe - 1 - w
                if at < len(slash):
                    slash[at] += x / observe
        pooled = [x.reshape(total, BLOCK).sum(1) for x in (vertical, slash)]
        last = q[0, h, -observe:].mean(0)
        estimate = (last @ means.T * SCALE).softmax(0).numpy()
        middle = (estimate + pooled[0]) / 2
        apart = sum((x * np.log(x / middle)).sum() / 2 for x in (estimate, pooled[0]))
        aware = math.sqrt(max(apart, 0)) < tau
        kinds.append(aware)
        for number, (tokens, blocks) in enumerate(zip((vertical, slash), pooled, strict=True)):
            within = (np.cumsum(np.sort(tokens.astype("f4"))[::-1]) <= share).sum() + 1
            count = least if aware else max(least, within // BLOCK + 1)
            best = np.argsort(-blocks, kind="stable")[:count]
            for b in best:
                needed |= {b - i for i in range(own)} if number else {int(b)}
        if aware:
            table = np.zeros((own, total))
            for j in range(own):
                mean = q[0, h, j * BLOCK : (j + 1) * BLOCK].mean(0)
                seen = FIRST // BLOCK + j + 1
                table[j, :seen] = (mean @ means[:seen].T * SCALE).softmax(0).numpy()
            reached = 0.0
            for at in np.argsort(-table.reshape(-1), kind="stable"):
                if reached >= share * own:
                    break
                needed.add(int(at % total))
                reached += table.reshape(-1)[at]
    return keys_of(b for b in needed if 0 <= b < BLOCKS), kinds


@pytest.mark.parametrize("tau", [0.0, 0.25, 1.0])
@pytest.mark.parametrize("share", [0.3, 0.6])
def test_flexprefill_reads_the_lists_of_its_paper(share, tau):
    q, k, pos = tensors(3, 1.5)
    how = method("flexprefill", budget=FIRST, share=share, tau=tau, least=4, observe=4)
    got = read(how, q, k, pos)
    want = [flex(q, k, g, share, tau, 1) for g in range(2)]
    assert got == [keys for keys, _ in want]
    kinds = {aware for _, each in want for aware in each}
    assert kinds == ({True} if tau == 1 else {False} if tau == 0 else kinds)
    other = [flex(q, k, g, share / 4, tau, 1)[0] for g in range(2)]
    assert got != other  # the control


def test_flexprefill_reads_more_with_more_of_the_share_and_all_with_all():
    q, k, pos = tensors(3, 1.5)
    before = [set(), set()]
    for share in (0.1, 0.3, 0.6, 0.9, 1.0):
        now = read(method("flexprefill", budget=FIRST, share=share, least=4), q, k, pos)
        assert all(a <= b for a, b in zip(before, now, strict=True)) and 0 in now[0] & now[1]
        before = now
    assert before == [set(range(FIRST))] * 2
    few = read(method("flexprefill", budget=8, share=0.9, least=4), q, k, pos)
    assert all(len(row) == 8 and 0 in row for row in few)


@pytest.mark.parametrize("name", ["minference", "pbs-attn", "flexprefill"])
def test_a_key_that_the_last_queries_attend_to_is_read(name):
    """And not by position alone, the control."""
    q, k, pos = tensors(4)
    q += torch.ones(8)
    k[:, :, 17] = 8.0
    assert all(17 in row for row in read(method(name, budget=16), q, k, pos))
    assert all(17 not in row for row in read(method("tri-shape", budget=16), q, k, pos))
