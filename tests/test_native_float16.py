"""The operators of a cache in half precision: halves as the reference makes them, attention as over the widened."""

import itertools

import numpy as np
import pytest
import torch

from accel.ir.ops.codec import encode_halves
from accel.lowering.onnx import native

from .test_native_int8 import SHAPES, SLOTS, attention, run

pytestmark = pytest.mark.skipif(native.library()[0] is None, reason=native.library()[1])
HELD = (1, 2, 7, 8)  # operands of Attention that hold keys and values


def halved(x):
    return encode_halves(torch.from_numpy(x)).numpy()


def operands(shape, tokens, exact, mask):
    """Of attention over halves, and over what they stand for."""
    *_, plain, settings = attention(np.random.default_rng(sum(shape)), shape, tokens, exact, mask)
    halves = [halved(x) if i in HELD else x for i, x in enumerate(plain)]
    wide = [x.astype(np.float32) if i in HELD else x for i, x in enumerate(halves)]
    return halves, wide, settings


def test_every_half_is_widened_as_it_is():
    every = np.arange(1 << 16, dtype=np.uint16).view(np.float16).reshape(2, -1)
    (wide,) = run("DecodeFloat16", [every], ["float32"])
    np.testing.assert_array_equal(wide, every.astype(np.float32))


def test_halves_are_the_nearest():
    """Those midway between two, of all sizes, and what is beyond them, or none."""
    every = np.arange(0x7BFF, dtype=np.uint16).view(np.float16).astype(np.float32)
    next_one = np.arange(1, 0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)
    midway = (every + next_one) / 2
    beyond = np.array([65504, 65520, 7e4, 1e30, np.inf, np.nan, 1e-30, 0], np.float32)
    apart = [midway, np.nextafter(midway, 0), np.nextafter(midway, 1e9), beyond]
    for sign in (1, -1):
        x = sign * np.concatenate(apart).astype(np.float32)
        (found,) = run("EncodeFloat16", [x], ["float16"])
        np.testing.assert_array_equal(found, halved(x))
    cut = (midway.view(np.uint32) & ~np.uint32(0x1FFF)).view(np.float32)
    assert (halved(midway) != halved(cut)).any(), "the control: half of them are rounded up"


@pytest.mark.few(1)
@pytest.mark.parametrize("shape", [*SHAPES, (9, 3, 64), (4, 1, 256)], ids=str)
def test_attention_is_that_over_the_widened_bit_for_bit(shape):
    for tokens, exact, mask in itertools.product((1, 3, 8, 33), (0, 1), (0, 1)):
        halves, wide, settings = operands(shape, tokens, exact, mask)
        (got,) = run("AttentionFloat16", halves, ["float32"], **settings)
        (want,) = run("Attention", wide, ["float32"], **settings)
        np.testing.assert_array_equal(got, want)
        bare = run("AttentionFloat16", halves[:7], ["float32"], **settings)[0]
        np.testing.assert_array_equal(bare, run("Attention", wide[:7], ["float32"], **settings)[0])
        assert np.abs(bare - got).max() > 1e-3


@pytest.mark.parametrize("exact", [0, 1])
def test_threads_give_the_same(exact):
    halves, _, settings = operands((9, 3, 64), 1, exact, 0)
    found = [
        run("AttentionFloat16", halves, ["float32"], threads=n, **settings)[0] for n in (1, 2, 5)
    ]
    np.testing.assert_array_equal(found[0], found[1])
    np.testing.assert_array_equal(found[0], found[2])


def test_what_slots_draw_is_that_of_the_widened():
    for tokens in (1, 33):
        halves, wide, settings = operands((6, 2, 24), tokens, 0, 0)
        share = np.ones((2, tokens), np.float32)
        more = [*[None] * 8, share]
        kinds, draws = ["float32"] * 3, dict(noise=0.0, seed=0)
        got = run(
            "DrawnAttentionFloat16", [*halves, *more], kinds, **settings | {"partial": 1}, **draws
        )
        want = run("DrawnAttention", [*wide, *more], kinds, **settings | {"partial": 1}, **draws)
        for a, b in zip(got, want, strict=True):
            np.testing.assert_array_equal(a, b)


def test_place_writes_the_halves_of_what_it_would_write():
    rng = np.random.default_rng(5)
    heads, groups, size, tokens = 4, 2, 21, 3
    x = rng.standard_normal((2, tokens, (heads + 2 * groups) * size)).astype(np.float32)
    x[0, 0, heads * size], x[1, 1, -1] = 1e5, -1e6
    slots = np.array([7, 250])
    settings = dict(heads=heads, interleaved=0, turned=0, q_epsilon=1e-5, k_epsilon=1e-5)
    blank = np.full((2, groups, SLOTS, size), 3, np.float32)
    want = run("Place", [x, slots, blank, blank], ["float32"] * 3, **settings)
    given = [x, slots, halved(blank), halved(blank)]
    found = run("PlaceFloat16", given, ["float32", "float16", "float16"], **settings)
    np.testing.assert_array_equal(found[0], want[0])
    for got, right in zip(found[1:], want[1:], strict=True):
        np.testing.assert_array_equal(got, halved(right))
        assert (got != 3).sum() == 2 * groups * tokens * size
    assert (found[1].max(), found[2].min()) == (65504, -65504)
