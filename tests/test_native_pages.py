"""The native operators over pages: attention reads those that are listed, products read rows as they lie."""

import itertools

import numpy as np
import pytest
import torch

from accel.ir.ops.attention import attention
from accel.lowering.onnx import native

from .test_native_int8 import SLOTS, keys, run

pytestmark = pytest.mark.skipif(native.library()[0] is None, reason=native.library()[1])
SHAPES = [(4, 4, 64), (16, 1, 24), (40, 1, 16), (6, 2, 10)]
MASKS = ("causal", "window")
WIDE = SLOTS // 128 * 128


def operands(rng, shape, tokens, mask, page, listed):
    """Of Attention over codes (decoded too), and the lists [2,G,T,K] of pages."""
    heads, groups, size = shape
    q = rng.standard_normal((2, heads, tokens, size)).astype(np.float32)
    k, v = (keys(rng, groups, width, WIDE)[1:] for width in (size, size + 3))
    held = np.tile(np.arange(WIDE), (2, 1))
    held[0, -40:], held[1, 5:9] = -1, -1
    q_pos = np.stack([np.arange(tokens) + WIDE - 40 - tokens, np.arange(tokens) + 100])
    kept = [keys(rng, groups, width, 40)[1:] for width in (size, size + 3)]
    places = np.where(rng.random((2, groups, 40)) < 0.8, np.arange(40), -1)
    pages = rng.permuted(np.tile(np.arange(WIDE // page), (2, groups, tokens, 1)), axis=3)[..., :listed]
    pages = np.where(rng.random(pages.shape) < 0.2, -1, pages)
    pages[..., 0] = (q_pos // page)[:, None]  # each sees itself
    pages[..., 1:][pages[..., 1:] == pages[..., :1]] = -1
    settings = dict(
        scale=0.3, softcap=0.0, mask=MASKS.index(mask), window=90, exact=0, packed=0, page=page
    )
    return q, q_pos, held, k, v, kept, places, pages, settings


def given(x, coded, kept, pages):
    """The operands of a node, over codes or what they stand for."""
    q, q_pos, held, k, v, before, places, _, settings = x
    which = 0 if coded else 2
    old = [before[0][which], before[1][which], places] if kept else [None] * 3
    more = [k[1], v[1], *([before[0][1], before[1][1]] if kept else [])] if coded else []
    return [q, k[which], v[which], q_pos, held, None, None, *old, pages, *more], settings


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention_over_pages_is_the_references(shape):
    rng = np.random.default_rng(sum(shape))
    for tokens, mask, page, kept in itertools.product((1, 5, 32), MASKS, (16, 64), (False, True)):
        x = operands(rng, shape, tokens, mask, page, 4)
        q, q_pos, held, k, v, before, places, pages, settings = x
        plain, settings = given(x, False, kept, pages)
        (got,) = run("Attention", plain, ["float32"], **settings)
        old = [before[0][2], before[1][2], places] if kept else [None] * 3
        numpy = [q, k[2], v[2], q_pos, held, *old, pages]
        q_, k_, v_, q_pos_, held_, *old_, pages_ = (
            None if a is None else torch.from_numpy(a) for a in numpy
        )
        want = attention(
            q_, k_, v_, q_pos_, held_, None, 0.3, 0.0, mask, 90, None, *old_, None, None, pages_, page
        )
        np.testing.assert_allclose(got, want.numpy(), atol=2e-5)
        codes, settings = given(x, True, kept, pages)
        np.testing.assert_array_equal(run("AttentionInt8", codes, ["float32"], **settings)[0], got)


def test_an_empty_list_is_everything():
    x = operands(np.random.default_rng(0), SHAPES[0], 3, "causal", 16, 4)
    every = np.tile(np.arange(WIDE // 16), (2, SHAPES[0][1], 3, 1))
    found = []
    for pages in (None, x[7][:, :, :0], every, x[7]):
        plain, settings = given(x, False, True, pages)
        found.append(run("Attention", plain, ["float32"], **settings)[0])
    np.testing.assert_array_equal(found[0], found[1])
    np.testing.assert_allclose(found[0], found[2], atol=2e-6)
    assert np.abs(found[0] - found[3]).max() > 1e-3


@pytest.mark.parametrize(
    "change",
    [
        lambda p, s: (p[:, :, :2], s),
        lambda p, s: (p[:1], s),
        lambda p, s: (p, s | {"page": 8}),
        lambda p, s: (p, s | {"page": 96}),
    ],
)
def test_lists_that_do_not_fit_are_an_error(change):
    x = operands(np.random.default_rng(0), SHAPES[0], 3, "causal", 16, 4)
    pages, settings = change(x[7], x[8])
    plain, _ = given(x, False, False, np.ascontiguousarray(pages))
    with pytest.raises(Exception, match="do not fit"):
        run("Attention", plain, ["float32"], **settings)


def test_pages_beyond_the_cache_are_passed_over():
    x = operands(np.random.default_rng(0), SHAPES[0], 1, "causal", 16, 3)
    wild = x[7].copy()
    wild[..., 2] = np.iinfo(np.int64).max
    tame = np.where(wild > WIDE, -1, wild)
    for a, b in itertools.pairwise(
        run("Attention", given(x, False, False, p)[0], ["float32"], **x[8])[0] for p in (wild, tame)
    ):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 7, 10])
@pytest.mark.parametrize(("many", "width"), [(1, 1), (17, 7), (130, 10), (300, 64)])
def test_dots_are_products(rows, many, width):
    rng = np.random.default_rng(rows + many)
    x, y = (rng.standard_normal((2, 3, n, width)).astype(np.float32) for n in (rows, many))
    (got,) = run("Dots", [x, y], ["float32"])
    np.testing.assert_allclose(got, x @ y.transpose(0, 1, 3, 2), atol=2e-5)
    swapped = run("Dots", [x, y[:, :, ::-1].copy()], ["float32"])[0]
    assert many == 1 or np.abs(swapped - got).max() > 1e-3
