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


@pytest.mark.parametrize("width", [1, 7, 8, 10, 24, 64, 129])
@pytest.mark.parametrize("bits", [2, 4, 8])
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
        scale=0.3, softcap=0.0, mask=mask, window=90 if mask else 0, exact=0, packed=0, page=0
    )
    ours = dict(bits=bits, rows=ROWS, k_group=group, v_group=group, k_along=1, v_along=0)
    given = [q, k, v, q_pos, held, None, None]
    coded = [*given, k_parts[0], v_parts[0], places, None, *k_parts[1:], *v_parts[1:]]
    return coded, [*given, k_back, v_back, places], settings, settings | ours


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
