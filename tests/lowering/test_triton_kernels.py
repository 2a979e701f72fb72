"""Triton kernels against the reference of each operator: on a GPU where there is one, else interpreted."""

import operator

import numpy as np
import pytest
import torch

from accel.ir.ops import attention, codec, flat, kv, rope
from accel.lowering.triton import lowered
from accel.lowering.triton.writer.builder import Builder
from accel.lowering.triton.writer.table import lower

from ..op_cases import CASES, key_positions, query_positions, randn, tables
from ..passes.batch.test_flat import alone
from ..test_ops import program_of
from .triton_case import close, on_device, run_program, sees

lowered._load_rules()

from accel.lowering.triton.kernels.attend import attend  # noqa: E402
from accel.lowering.triton.rules import accel_attention, accel_cache  # noqa: E402  (they import triton)
from accel.lowering.triton.writer import chip  # noqa: E402
from accel.lowering.triton.writer.tuned import Choice, Tuned  # noqa: E402

NAMES = [name for name, case in CASES.items() if case.op.default in lower.rules]
SMALL = ((1, 1, 6), (2, 4, 9))
REAL = [  # B, H, G, T, C, D, Dv, mask, window
    (1, 4, 4, 1, 150, 64, 64, "causal", 0),  # several splits
    (1, 4, 2, 1, 150, 64, 64, "window", 70),
    (2, 6, 2, 1, 70, 80, 80, "window", 9),
    (2, 6, 2, 2, 70, 80, 80, "full", 0),
    (1, 8, 1, 3, 40, 128, 128, "causal", 0),
    (1, 8, 1, 3, 40, 128, 128, "chunk", 16),
    (1, 6, 6, 1, 33, 10, 6, "causal", 0),
    (1, 2, 1, 70, 90, 10, 10, "window", 30),  # tiles of tokens
    (1, 80, 1, 1, 20, 16, 16, "causal", 0),  # more heads than rows of a tile
    (1, 3, 1, 2, 20, 300, 270, "causal", 0),  # as wide as a latent
]


@pytest.fixture(autouse=True)
def several_splits(monkeypatch):
    if not torch.cuda.is_available():
        monkeypatch.setattr(chip, "processors", lambda device: 4)


def compare(operands):
    """Kernels and reference on the same operands, of which the last ones may be left out."""
    q, k, v, q_pos, k_pos, bias, scale, cap, mask, window, *more = operands
    more = [*more, *[None] * (11 - len(more))]
    (sink, kept_k, kept_v, kept_pos, tree, first), counts = more[:6], more[10]
    want = attention.attention(*operands)
    q, k, v, q_pos, k_pos, bias, sink, tree, first = on_device(
        (q, k, v, q_pos, k_pos, bias, sink, tree, first)
    )
    lists = accel_attention.survey(q_pos, k_pos, mask, window, q.shape[1] // k.shape[1], q.shape[3])
    parts = [(k, v, k_pos, None, lists)]
    if kept_k is not None:
        old = on_device((kept_k, kept_v, kept_pos, counts))
        parts.insert(0, (*old[:3], None, None, old[3]))
    got = accel_attention.attended(
        q, q_pos, parts, bias, scale, cap, mask, window, sink, tree, first
    )
    got = got.cpu().transpose(1, 2)
    seen = sees(operands)
    if kept_k is not None and counts is None:
        seen |= (q_pos.cpu() >= 0) & (kept_pos[:, :1] == 0).any(-1)
    assert got.isfinite().all()
    close(got[seen], want.transpose(1, 2)[seen])
    assert (got[~seen] == 0).all() or kept_k is not None
    return int(seen.sum())


def made(shape, mask, window, seed=0):
    b, h, g, t, c, d, wide = shape
    rng = np.random.default_rng(seed)
    k_pos = torch.from_numpy(np.stack([rng.permutation(c) for _ in range(b)]))
    k_pos = torch.where(torch.from_numpy(rng.random((b, c)) < 0.3) & (k_pos > 0), -1, k_pos)
    q_pos = torch.from_numpy(rng.integers(0, c - t + 1, (b, 1)) + np.arange(t))
    q_pos[0, -1] = -1 if t > 1 else int(q_pos[0, -1])
    return [
        randn(rng, b, h, t, d), randn(rng, b, g, c, d), randn(rng, b, g, c, wide), q_pos, k_pos,
        None, d**-0.5, 0.0, mask, window,
    ]  # fmt: skip


@pytest.mark.few(9)
@pytest.mark.parametrize("name", NAMES)
def test_a_lowering_equals_the_reference(name):
    case = CASES[name]
    for sizes in SMALL:
        operands = case.operands(sizes)
        want = case.op.reference(*operands)
        got = run_program(program_of(case), operands)
        if case.op is attention.attention:
            seen = sees(operands)
            assert got[0].isfinite().all()
            got, want = [got[0].transpose(1, 2)[seen]], want.transpose(1, 2)[seen]
        if (
            case.op is attention.partial_attention
        ):  # rows that see nothing: any result, and no weight
            seen = want[1] > torch.finfo(torch.float32).min / 2
            assert got[0].isfinite().all()
            got, want = (got[0][seen], got[1]), (want[0][seen], want[1])
        if case.op is flat.flat_attention:
            seen = alone(operands)[1]
            assert got[0].isfinite().all()
            got, want = [got[0] * seen], want * seen
        for one, other in zip(got, want if isinstance(want, tuple) else (want,), strict=True):
            close(one, other)


def test_most_forms_of_attention_have_a_kernel():
    assert {n for n in CASES if n.startswith("attention-")} <= set(NAMES)
    assert {"rope-10-halves", "kv_append-heads", "rms_norm", "expert_linear-True"} <= set(NAMES)


@pytest.mark.few(4)
@pytest.mark.parametrize("form", REAL, ids=str)
def test_attention_at_real_head_sizes(form):
    assert compare(made(form[:7], *form[7:]))


@pytest.mark.few(2)
@pytest.mark.parametrize("place", range(6))
def test_each_candidate_of_attention_is_right(place, monkeypatch):
    """One split and several, whichever the autotuner takes; several parts have the splits that there is room for."""
    right, taken = accel_attention._candidates, []

    def one(*args):
        found = right(*args)
        taken.append((len(found), found[place]["splits"]))
        return [found[place]]

    monkeypatch.setattr(accel_attention, "_candidates", one)
    monkeypatch.setattr(accel_attention, "_attend", Tuned(attend, ()))
    operands = made((1, 4, 2, 1, 150, 16, 16), "causal", 0)
    assert compare(operands)
    kept = made((1, 4, 2, 1, 70, 16, 16), "causal", 0)
    assert compare([*operands, None, kept[1], kept[2], kept[4][:, None].expand(-1, 2, -1)])
    assert taken[0] == (6, 3 if place < 3 else 1) and taken[1][1] > 3


def test_more_splits_than_there_is_room_for_are_seen(monkeypatch):
    monkeypatch.setattr(
        accel_attention, "_candidates", lambda *_: [Choice({"splits": 2, "WHOLE": True})]
    )
    with pytest.raises(AssertionError):
        compare(made((1, 4, 2, 1, 150, 16, 16), "causal", 0))


def test_attention_reads_no_block_that_nobody_sees():
    operands = made((1, 4, 2, 1, 200, 16, 16), "window", 20)
    operands[3] = torch.tensor([[150]])
    operands[4] = torch.arange(200)[None]
    blocks, counts = accel_attention.survey(*operands[3:5], "window", 20, 2, 16)
    assert blocks[0, 0, : counts[0, 0]].tolist() == [2], "of 64 slots: 131 .. 150"
    hidden = operands[2].clone()
    hidden[:, :, :128] = hidden[:, :, 192:] = float("nan")
    kept = attention.attention(*operands)
    out = accel_attention.attended(
        *on_device((operands[0], operands[3])),
        [on_device((operands[1], hidden, operands[4], None, (blocks, counts)))],
        None, operands[6], 0.0, "window", 20, None, None, None,
    )  # fmt: skip
    close(out.cpu(), kept)


def test_no_slots_at_all_give_nothing():
    q = on_device(torch.ones(2, 4, 3, 16))
    empty = on_device((torch.ones(2, 2, 0, 16), torch.ones(2, 2, 0, 8), torch.ones(2, 0).long()))
    out = accel_attention.attended(
        q,
        on_device(torch.zeros(2, 3).long()),
        [empty],
        None,
        1.0,
        0.0,
        "causal",
        0,
        None,
        None,
        None,
    )
    assert out.shape == (2, 4, 3, 8) and not out.any()


@pytest.mark.parametrize("held", [0, 5, 70])
def test_kept_slots_of_each_head_come_before_the_recent_ones(held):
    rng = np.random.default_rng(held)
    operands = made((2, 4, 2, 3, 20, 16, 16), "causal", 0)
    operands[3] = torch.tensor([[40, 41, 42], [60, 61, -1]])
    pos = torch.from_numpy(
        np.stack([[rng.permutation(max(held, 1))[:held] for _ in "gg"] for _ in "bb"])
    )
    pos = torch.where(torch.from_numpy(rng.random(pos.shape) < 0.3) & (pos > 0), -1, pos)
    tree = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]]).bool().repeat(2, 1, 1)
    kept = [randn(rng, 2, 2, held, 16), randn(rng, 2, 2, held, 16), pos]
    first = torch.tensor([4, 7])
    for b, f in enumerate(first):
        operands[4][b, f : f + 3] = operands[3][b]
    assert compare([*operands, None, *kept, tree, first])


@pytest.mark.parametrize("counts", [[[0, 70], [3, 33]], [[5, 0], [0, 1]], [[0, 0], [0, 0]]])
def test_kept_slots_of_unequal_numbers_lie_one_head_after_another(counts):
    rng, counts = np.random.default_rng(0), torch.tensor(counts)
    operands = made((2, 4, 2, 3, 20, 16, 16), "causal", 0)
    operands[3] = torch.tensor([[40, 41, 42], [60, 61, -1]])
    room = int(counts.sum(1).max()) + 1
    pos = torch.stack([torch.from_numpy(rng.permutation(room)) for _ in range(2)])[:, None]
    pos = torch.where(torch.arange(room) < counts.sum(1)[:, None, None], pos, -1)
    kept = [randn(rng, 2, 1, room, 16), randn(rng, 2, 1, room, 16), pos]
    given = [*operands, None, *kept, None, None, None, 0, None, None]
    assert compare([*given, counts])
    other = attention.attention(*given, counts.flip(1))
    same = torch.allclose(attention.attention(*given, counts), other)
    assert same == (counts.sum() == 0)


@pytest.mark.parametrize("form", [REAL[1], REAL[4], REAL[7]], ids=str)
@pytest.mark.parametrize("sink", [False, True])
def test_partial_results_over_kernels_merge_to_the_whole(form, sink):
    operands = made(form[:7], *form[7:])
    q, k, v, q_pos, k_pos, *rest = operands
    cut, sinks = k.shape[2] // 3, torch.linspace(-1, 3, q.shape[1]) if sink else None
    want, real = attention.partial_attention(*operands, sinks), sees(operands)

    def part(kernel, where, *more):
        read = on_device((k[:, :, where], v[:, :, where], k_pos[:, where]))
        x = rest[1], rest[2], rest[3], rest[4], more[0], None, None, *more[1:]
        return kernel(*on_device((q, q_pos)), [read], None, *on_device(x))

    first = part(accel_attention.partly, slice(0, cut), None)
    second = part(accel_attention.partly, slice(cut, None), sinks)
    merged = attention.merged(*first, *second)
    inside = part(accel_attention.attended, slice(cut, None), sinks, *first)
    for got in (merged[0], inside):
        close(got.cpu().transpose(1, 2)[real], want[0].transpose(1, 2)[real])
    close(merged[1].cpu().transpose(1, 2)[real], want[1].transpose(1, 2)[real])
    lost = attention.merged(first[0], first[1] - 1, *second)[0].cpu().transpose(1, 2)[real]
    assert (lost - want[0].transpose(1, 2)[real]).abs().max() > 1e-3


def test_a_token_that_is_not_a_number_spoils_itself_only():
    operands = made((2, 4, 2, 4, 30, 16, 16), "causal", 0)
    operands[3] = torch.arange(20, 24).repeat(2, 1)
    operands[4] = torch.arange(30).repeat(2, 1)
    operands[0][0, :, 1] = float("nan")
    out = accel_attention.attended(
        *on_device((operands[0], operands[3], [tuple(operands[i] for i in (1, 2, 4))])),
        None, 0.25, 0.0, "causal", 0, None, None, None,
    )  # fmt: skip
    spoilt = out.cpu().isnan().any(1).any(-1)
    assert spoilt.nonzero().tolist() == [[0, 1]]


def test_a_key_that_is_not_a_number_is_not_hidden():
    operands = made((1, 2, 1, 2, 30, 16, 16), "causal", 0)
    operands[3], operands[4] = torch.tensor([[9, 25]]), torch.arange(30)[None]
    operands[1][0, 0, 12] = float("nan")
    out = accel_attention.attended(
        *on_device((operands[0], operands[3], [tuple(operands[i] for i in (1, 2, 4))])),
        None, 0.25, 0.0, "causal", 0, None, None, None,
    )  # fmt: skip
    assert not out[:, :, 0].isnan().any() and out[:, :, 1].isnan().all()


# The tests' own power


def last_block_lost(q_pos, k_pos, *rest):
    blocks, counts = survey(q_pos, k_pos, *rest)
    return blocks, (counts - 1).clamp(min=1)


def other_window(q, q_pos, parts, bias, scale, cap, mask, window, *rest):
    return attended(q, q_pos, parts, bias, scale, cap, mask, window + 1, *rest)


survey, attended = accel_attention.survey, accel_attention.attended


@pytest.mark.parametrize("wrong", [last_block_lost, other_window])
def test_a_wrong_kernel_is_caught(wrong, monkeypatch):
    name = {last_block_lost: "survey", other_window: "attended"}[wrong]
    monkeypatch.setattr(accel_attention, name, wrong)
    with pytest.raises(AssertionError, match="not close"):
        operands = made((1, 4, 2, 1, 150, 16, 16), "window", 90)
        operands[3], operands[4] = torch.tensor([[120]]), torch.arange(150)[None]
        compare(operands)


# The cache


@pytest.mark.parametrize("rotated,interleaved", [(0, False), (10, False), (4, True)])
def test_keys_and_values_are_placed_at_once(rotated, interleaved):
    rng = np.random.default_rng(5)
    k, v = randn(rng, 2, 5, 3, 10).transpose(1, 2), randn(rng, 2, 3, 5, 6)  # heads by token, or not
    keys, values = randn(rng, 2, 3, 11, 10), randn(rng, 2, 3, 11, 6)
    positions, slots = query_positions(rng, 2, 5, 20), torch.tensor([6, 1])
    turn = (positions, *tables(rotated), interleaved) if rotated else None
    turned = rope.rope(k, *turn) if turn else k
    want = [kv.kv_append(keys, turned, slots), kv.kv_append(values, v, slots)]
    mine = on_device((keys.clone(), values.clone()))
    got = accel_cache.place_both(*mine, *on_device((k, v, slots, turn)))
    for one, buffer, other in zip(got, mine, want, strict=True):
        assert one is buffer
        close(one.cpu(), other)
    assert not torch.equal(keys, want[0])


@pytest.mark.parametrize("rotated,interleaved", [(0, False), (10, False), (4, True)])
def test_keys_are_rounded_as_they_are_placed(rotated, interleaved):
    rng = np.random.default_rng(6)
    k = randn(rng, 2, 5, 3, 10).transpose(1, 2)
    k[0, 0, 1] = 0  # a row of zeros
    k[1, 2, 3, 4] = float("inf")
    codes, scales = torch.zeros(2, 3, 11, 10, dtype=torch.int8), torch.zeros(2, 3, 11)
    positions, slots = query_positions(rng, 2, 5, 20), torch.tensor([6, 1])
    turn = (positions, *tables(rotated), interleaved) if rotated else None
    code, scale = codec.encode_rows(rope.rope(k, *turn) if turn else k)
    want = [kv.kv_append(codes, code, slots), kv.kv_append(scales, scale, slots)]
    mine = on_device((codes.clone(), scales.clone()))
    got = accel_cache.place_rounded(*mine, *on_device((k, slots, turn)))
    assert got[0] is mine[0] and got[1] is mine[1]
    torch.testing.assert_close(got[1].cpu(), want[1], equal_nan=True)
    assert want[1].isnan().sum() == 1
    # the product of a turn may be rounded once or twice, and a half then falls to either side
    assert (got[0].cpu().int() - want[0]).abs().max() <= (1 if turn else 0)


@pytest.mark.parametrize("form", [REAL[1], REAL[3], REAL[4]], ids=str)
def test_keys_and_values_in_8_bits_are_read_as_they_lie(form):
    operands = made(form[:7], *form[7:])
    k, v = (codec.encode_rows(operands[i]) for i in (1, 2))
    operands[1:3] = codec.decode_rows(*k), codec.decode_rows(*v)
    q, q_pos, k_pos = on_device([operands[i] for i in (0, 3, 4)])
    scales = on_device((k[1], v[1]))
    got = accel_attention.attended(
        q, q_pos, [(*on_device((k[0], v[0])), k_pos, scales)],
        None, operands[6], 0.0, *operands[8:10], None, None, None,
    )  # fmt: skip
    want, seen = attention.attention(*operands), sees(operands)
    close(got.cpu().transpose(1, 2)[seen], want.transpose(1, 2)[seen])
    swapped = accel_attention.attended(
        q, q_pos, [(*on_device((k[0], v[0])), k_pos, scales[::-1])],
        None, operands[6], 0.0, *operands[8:10], None, None, None,
    )  # fmt: skip
    assert not torch.allclose(swapped, got, atol=1e-3)


def test_a_buffer_that_is_read_elsewhere_is_not_written_in_place():
    case = CASES["kv_append-heads"]
    program = program_of(case)
    operands = case.operands((2, 4, 11))
    builder = Builder(program, "cpu")
    builder.entry(program.step, [])
    calls = [n.target for n in builder.graph.nodes]
    assert torch.ops.aten.clone.default in calls
    before = operands[0].clone()
    (got,) = run_program(program, operands)
    close(got, case.op.reference(*operands))
    assert torch.equal(operands[0], before)
    assert operator.getitem not in calls


def test_positions_in_any_order_and_holes_do_not_matter():
    rng = np.random.default_rng(1)
    operands = made((2, 4, 2, 2, 40, 16, 16), "window", 11)
    operands[4] = key_positions(rng, 2, 40)
    assert compare(operands)
