"""Blocks of few bits read in place: decoded as the reference does, attended to as over the decoded."""

import itertools

import numpy as np
import pytest
import torch

from accel.ir.ops.groups import group_dequantize, group_quantize
from accel.lowering.onnx import native

from .test_native_int8 import run

pytestmark = pytest.mark.skipif(native.library()[0] is None, reason=native.library()[1])
ROWS, SLOTS, STORED = 16, 150, 176


def blocks(rng, groups, width, bits, group, along):
    """Codes, scales, smallest numbers of random blocks, and what they stand for [2,G,STORED,width]."""
    x = torch.from_numpy(
        rng.standard_normal((2, groups, STORED // ROWS, ROWS, width)).astype(np.float32)
    )
    parts = group_quantize(x, bits, group, along)
    back = group_dequantize(*parts, bits, group, along, ROWS, width)
    return [p.numpy() for p in parts], back.numpy()


@pytest.mark.few(12)
@pytest.mark.parametrize("width", [1, 7, 8, 10, 24, 64, 129])
@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_numbers_are_the_references(width, bits):
    for group, along in (
        (4, "rows"),
        (16, "rows"),
        (4, "channels"),
        (32, "channels"),
        (5, "channels"),
    ):
        parts, back = blocks(np.random.default_rng(width), 3, width, bits, group, along)
        settings = dict(bits=bits, group=group, along=int(along == "rows"), rows=ROWS, width=width)
        (got,) = run("DecodeGroups", parts, ["float32"], **settings)
        np.testing.assert_allclose(got, back, atol=2e-6, rtol=2e-6)  # one rounding instead of two


def test_ends_of_float16_are_the_references():
    """Steps beyond its normal numbers, at both ends."""
    x = (
        torch.tensor([1e-7, 3e-6, 6e4, -6e4])
        .reshape(1, 1, 1, 4, 1)
        .expand(1, 1, 1, 4, 8)
        .contiguous()
    )
    for scale in (1.0, 1e-3, 1e30):
        parts = group_quantize(x * scale, 4, 2, "rows")
        want = group_dequantize(*parts, 4, 2, "rows", 4, 8).numpy()
        settings = dict(bits=4, group=2, along=1, rows=4, width=8)
        (got,) = run("DecodeGroups", [p.numpy() for p in parts], ["float32"], **settings)
        np.testing.assert_allclose(got, want, rtol=1e-6)


def operands(rng, shape, tokens, how, mask, shared):
    """Of AttentionGroups, and of Attention over what the blocks stand for."""
    heads, groups, size = shape
    bits, group = how
    wide = size + 3
    k_parts, k_back = blocks(rng, groups, size, bits, group, "rows")
    v_parts, v_back = blocks(rng, groups, wide, bits, group, "channels")
    q = rng.standard_normal((2, heads, tokens, size)).astype(np.float32)
    k, v = (rng.standard_normal((2, groups, SLOTS, n)).astype(np.float32) for n in (size, wide))
    held = np.tile(np.arange(SLOTS), (2, 1)) + STORED
    held[0, -30:], held[1, 5:9] = -1, -1
    q_pos = STORED + SLOTS - 30 - tokens + np.tile(np.arange(tokens), (2, 1))
    q_pos[1] -= SLOTS  # sees nothing but what is stored
    places = np.tile(np.arange(STORED), (2, 1 if shared else groups, 1))
    places[1, :, -ROWS:] = -1
    settings = dict(
        scale=0.3,
        softcap=0.0,
        mask=mask,
        window=90 if mask else 0,
        exact=0,
        packed=0,
        page=0,
        partial=0,
    )
    ours = dict(
        k_bits=bits,
        v_bits=bits,
        rows=ROWS,
        k_group=group,
        v_group=group,
        k_along=1,
        v_along=0,
        v_width=wide,
        k_down=0,
        v_down=0,
    )
    given = [q, k, v, q_pos, held, None, None]
    coded = [*given, k_parts[0], v_parts[0], places, None, *k_parts[1:], *v_parts[1:]]
    return coded, [*given, k_back, v_back, places], settings, settings | ours


@pytest.mark.few(1)
@pytest.mark.parametrize("shape", [(4, 2, 24), (3, 3, 8), (8, 1, 64), (2, 2, 7)], ids=str)
def test_attention_is_that_over_the_decoded(shape):
    rng = np.random.default_rng(sum(shape))
    for tokens, how, mask in itertools.product((1, 4, 17), ((2, 4), (4, 16)), (0, 1)):
        coded, plain, settings, ours = operands(rng, shape, tokens, how, mask, tokens > 1)
        (got,) = run("AttentionGroups", coded, ["float32"], **ours)
        (want,) = run("Attention", plain, ["float32"], **settings)
        np.testing.assert_allclose(got, want, atol=3e-6, rtol=1e-5)


def test_a_step_of_another_block_is_noticed():
    coded, plain, settings, ours = operands(
        np.random.default_rng(0), (4, 2, 24), 3, (2, 4), 0, True
    )
    coded[11] = np.roll(coded[11], 1, axis=2)
    (got,) = run("AttentionGroups", coded, ["float32"], **ours)
    assert np.abs(got - run("Attention", plain, ["float32"], **settings)[0]).max() > 1e-3


@pytest.mark.parametrize("index", [7, 8, 11, 14])
def test_blocks_that_do_not_fit_are_an_error(index):
    coded, _, _, ours = operands(np.random.default_rng(0), (4, 2, 24), 2, (2, 4), 0, True)
    coded[index] = coded[index][:, :, :, :-1].copy()
    with pytest.raises(Exception, match="do not fit"):
        run("AttentionGroups", coded, ["float32"], **ours)


def in_slots(rng, groups, count, width, bits, group):
    """Codes, scales, smallest numbers of slots that are blocks, and what they stand for [2,G,count,width]."""
    x = torch.from_numpy(rng.standard_normal((2, groups, count, 1, width)).astype(np.float32))
    parts = group_quantize(x, bits, group, "channels")
    back = group_dequantize(*parts, bits, group, "channels", 1, width)
    return [p.numpy() for p in parts], back.numpy()


def slots_of_codes(shape, tokens, bits, kept, listed):
    """Operands of AttentionCodes, and of Attention over what the codes stand for."""
    rng = np.random.default_rng(tokens)
    (heads, groups, size), wide, count = shape, shape[2] + 3, 160
    made = {
        (part, role): in_slots(rng, groups, n, width, bit, 8)
        for part, n in (("new", count), ("old", STORED))
        for role, width, bit in zip("kv", (size, wide), bits, strict=True)
    }
    q = rng.standard_normal((2, heads, tokens, size)).astype(np.float32)
    held = np.tile(np.arange(count), (2, 1)) + STORED * kept
    held[0, -30:] = -1
    q_pos = held.max() - 40 + np.tile(np.arange(tokens), (2, 1))
    places = np.tile(np.arange(STORED), (2, groups, 1)) if kept else None
    pages = np.sort(rng.permuted(np.tile(np.arange(7), (2, groups, tokens, 1)), axis=3)[..., :4])
    given = [q, None, None, q_pos, held, None, None]
    coded, plain = [*given, None, None, places], [*given, None, None, places]
    scales = []
    for part, at in (("new", 1), ("old", 7)):
        for i, role in enumerate("kv"):
            parts, back = made[part, role]
            if part == "new" or kept:
                coded[at + i], plain[at + i] = parts[0], back
            scales += parts[1:] if part == "new" or kept else [None, None]
    pages = [pages] if listed else [None]
    settings = dict(scale=0.3, softcap=0.0, mask=0, window=0, exact=0, packed=0, page=16, partial=0)
    ours = dict(
        rows=1, k_group=8, v_group=8, k_along=0, v_along=0, v_width=wide, k_down=0, v_down=0
    )
    ours |= dict(zip(("k_bits", "v_bits"), bits, strict=True))
    return [*coded, *pages, *scales], [*plain, *pages], settings, settings | ours


@pytest.mark.few(1)
@pytest.mark.parametrize("bits", [(4, 2), (8, 8), (2, 1)], ids=str)
@pytest.mark.parametrize("kept", [False, True])
def test_attention_over_slots_of_codes_is_that_over_the_decoded(bits, kept):
    for shape, tokens, listed in itertools.product(
        ((4, 2, 24), (8, 1, 64), (2, 2, 7)), (1, 4, 17), (False, True)
    ):
        coded, plain, settings, ours = slots_of_codes(shape, tokens, bits, kept, listed)
        (got,) = run("AttentionCodes", coded, ["float32"], **ours)
        (want,) = run("Attention", plain, ["float32"], **settings)
        np.testing.assert_allclose(got, want, atol=3e-6, rtol=1e-5)


def test_codes_of_another_slot_are_noticed():
    coded, plain, settings, ours = slots_of_codes((4, 2, 24), 3, (4, 2), False, False)
    coded[1] = np.roll(coded[1], 1, axis=2)
    (got,) = run("AttentionCodes", coded, ["float32"], **ours)
    assert np.abs(got - run("Attention", plain, ["float32"], **settings)[0]).max() > 1e-3


@pytest.mark.parametrize("index", [1, 2, 11, 14])
def test_slots_that_do_not_fit_are_an_error(index):
    coded, _, _, ours = slots_of_codes((4, 2, 24), 2, (4, 2), False, False)
    coded[index] = coded[index][:, :, :, :-1].copy()
    with pytest.raises(Exception, match="do not fit"):
        run("AttentionCodes", coded, ["float32"], **ours)
