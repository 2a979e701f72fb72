"""The native operators over pages: attention reads those that are listed, products read rows as they lie."""

import itertools

import numpy as np
import pytest
import torch

from accel.ir.ops.attention import attention
from accel.ir.ops.choice import best_pages, page_bounds, page_range
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
    pages = rng.permuted(np.tile(np.arange(WIDE // page), (2, groups, tokens, 1)), axis=3)[
        ..., :listed
    ]
    pages = np.where(rng.random(pages.shape) < 0.2, -1, pages)
    pages[..., 0] = (q_pos // page)[:, None]  # each sees itself
    pages[..., 1:][pages[..., 1:] == pages[..., :1]] = -1
    settings = dict(
        scale=0.3,
        softcap=0.0,
        mask=MASKS.index(mask),
        window=90,
        exact=0,
        packed=0,
        page=page,
        partial=0,
    )
    return q, q_pos, held, k, v, kept, places, pages, settings


def given(x, coded, kept, pages):
    """The operands of a node, over codes or what they stand for."""
    q, q_pos, held, k, v, before, places, _, settings = x
    which = 0 if coded else 2
    old = [before[0][which], before[1][which], places] if kept else [None] * 3
    more = [k[1], v[1], *([before[0][1], before[1][1]] if kept else [])] if coded else []
    return [q, k[which], v[which], q_pos, held, None, None, *old, pages, *more], settings


@pytest.mark.few(1)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention_over_pages_is_the_references(shape):
    rng = np.random.default_rng(sum(shape))
    for tokens, mask, page, kept in itertools.product(
        (1, 5, 32), MASKS, (1, 4, 16, 64), (False, True)
    ):
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
            q_,
            k_,
            v_,
            q_pos_,
            held_,
            None,
            0.3,
            0.0,
            mask,
            90,
            None,
            *old_,
            None,
            None,
            pages_,
            page,
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
        lambda p, s: (p, s | {"page": 7}),
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
def test_bounds_are_the_references(rows, many, width):
    rng = np.random.default_rng(rows + many)
    q, high, low = (
        rng.standard_normal((2, 3, n, width)).astype(np.float32) for n in (rows, many, many)
    )
    high[0, 1, -1, 0], low[1, 2, 0, -1] = np.nan, np.nan
    (got,) = run("PageBounds", [q, high, low], ["float32"])
    want = page_bounds(*map(torch.from_numpy, (q, high, low))).numpy()
    np.testing.assert_allclose(got, want, atol=2e-5)
    assert np.isnan(got).sum() == 2 * rows
    swapped = run("PageBounds", [q, low, high], ["float32"])[0]
    assert np.nanmax(np.abs(swapped - got)) > 1e-3


@pytest.mark.parametrize("coded", [False, True])
@pytest.mark.parametrize(
    ("slots", "tokens", "page", "width"),
    [
        (1, 1, 1, 1),
        (64, 1, 16, 8),
        (64, 33, 16, 10),
        (50, 50, 16, 7),
        (640, 600, 64, 24),
        (2048, 1700, 16, 19),
    ],
)
def test_ranges_are_the_references(slots, tokens, page, width, coded):
    rng = np.random.default_rng(slots + tokens)
    _, codes, scale, x = keys(rng, 3, width, slots + 3)
    codes, scale, x = (np.ascontiguousarray(a[:, :, 3:]) for a in (codes, scale, x))
    if not coded:
        x[0, 1, tokens // 2, 0], x[1, 2, -1, -1], x[1, 0, 0, 0] = np.nan, np.inf, -np.inf
    pages = -(-slots // page)
    held = [rng.standard_normal((2, 3, pages, width)).astype(np.float32) for _ in range(2)]
    for start in {0, (slots - tokens) // 2, slots - tokens}:
        begins = np.array([start, slots - tokens])  # rows lie apart
        q_pos = np.full((2, tokens), -1)
        name, read, more = ("PageRangeInt8", codes, [scale]) if coded else ("PageRange", x, [])
        got = run(name, [*held, read, q_pos, begins, *more], ["float32"] * 2, page=page)
        want = page_range(*(torch.from_numpy(a) for a in (*held, x, q_pos, begins)), page)
        for mine, right, old in zip(got, want, held, strict=True):
            np.testing.assert_array_equal(mine, right.numpy())
            for row, first in enumerate(begins):
                filled = slice(first // page, (first + tokens) // page)
                other = np.delete(mine[row], np.r_[filled], axis=1)
                np.testing.assert_array_equal(other, np.delete(old[row], np.r_[filled], axis=1))


def choices(rng, batch, groups, tokens, slots, page, spread):
    """Operands of BestPages, whose worths are often equal where `spread` is small."""
    worth = (
        (rng.standard_normal((batch, groups, tokens, -(-slots // page))) * spread)
        .round()
        .astype(np.float32)
    )
    for number in (np.nan, np.inf, -np.inf, -0.0):
        worth[rng.random(worth.shape) < 0.05] = number
    held = np.where(rng.random((batch, slots)) < 0.9, np.arange(slots), -1)
    first = rng.integers(0, slots - tokens + 1, batch)
    q_pos = first[:, None] + np.arange(tokens)
    q_pos[-1, -1] = -1 if tokens > 1 else q_pos[-1, -1]  # padding
    return [worth, q_pos, held, first]


@pytest.mark.few(4)
@pytest.mark.parametrize("spread", [0.4, 1e3])
@pytest.mark.parametrize(
    ("slots", "page"), [(1, 1), (7, 2), (40, 16), (33, 16), (900, 1), (5000, 4)], ids=str
)
def test_the_best_pages_are_the_references(slots, page, spread):
    rng = np.random.default_rng(slots)
    for tokens, count, (number, mask) in itertools.product(
        (1, min(5, slots)), (1, 2, 9, 64), enumerate(("causal", "window", "chunk", "full"))
    ):
        x = choices(rng, 3, 2, tokens, slots, page, spread)
        (got,) = run(
            "BestPages", x, ["int64"], count=count, page=page, mask=number, window=slots // 2 + 1
        )
        want = best_pages(*map(torch.from_numpy, x), count, page, mask, slots // 2 + 1)
        np.testing.assert_array_equal(got, want.numpy())


def test_of_equal_pages_the_earlier_is_chosen():
    worth = np.zeros((1, 1, 1, 50), np.float32)
    worth[..., 1::2] = -0.0
    worth[..., [9, 30]] = 1
    x = [worth, np.array([[49]]), np.arange(50)[None], np.array([49])]
    (got,) = run("BestPages", x, ["int64"], count=6, page=1, mask=0, window=0)
    assert got.flatten().tolist() == [49, 9, 30, 0, 1, 2]


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_fetching_leaves_lists_as_they_are(dtype):
    """Whatever they say: none, a slot behind the last, in memory that is no file."""
    rng = np.random.default_rng(3)
    listed = rng.integers(-3, 9, (2, 3, 2, 5))
    held = rng.integers(0, 9, (2, 3, 64, 7)).astype(dtype)
    op = "FetchPages" if dtype == "float32" else "FetchPagesInt8"
    for given in (listed, listed[:, :, :0], np.full((2, 3, 1, 1), 1 << 60)):
        (got,) = run(op, [given, held], ["int64"], page=16)
        np.testing.assert_array_equal(got, given)
    with pytest.raises(Exception, match="do not fit"):
        run(op, [listed[:, :2], held], ["int64"], page=16)


@pytest.mark.parametrize("op", ["PageRange", "BestPages"])
def test_threads_give_the_same(op):
    rng = np.random.default_rng(5)
    x = choices(rng, 2, 4, 3, 4096, 16, 1.0)
    kept = [rng.standard_normal((2, 4, n, 24)).astype(np.float32) for n in (256, 256, 4096)]
    given = x if op == "BestPages" else [*kept, np.zeros((2, 3000), np.int64), np.array([5, 900])]
    settings = dict(count=40, page=16, mask=0, window=0) if op == "BestPages" else dict(page=16)
    types = ["int64"] if op == "BestPages" else ["float32"] * 2
    alone, many = (run(op, given, types, threads=n, **settings) for n in (1, 4))
    for a, b in zip(alone, many, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("op", "changed", "shape"),
    [
        ("BestPages", 0, (1, 2, 3, 9)),
        ("BestPages", 2, (1, 50)),
        ("PageRange", 0, (1, 2, 3, 4)),
        ("PageRange", 4, (3,)),
    ],
)
def test_sizes_that_do_not_fit_are_an_error(op, changed, shape):
    rng = np.random.default_rng(0)
    x = choices(rng, 1, 2, 3, 32, 16, 1.0)
    if op == "PageRange":
        x = [
            *(np.zeros((1, 2, n, 4), np.float32) for n in (2, 2, 32)),
            np.zeros((1, 3), np.int64),
            x[3],
        ]
    x[changed] = np.zeros(shape, x[changed].dtype)
    settings = dict(count=4, page=16, mask=0, window=0) if op == "BestPages" else dict(page=16)
    with pytest.raises(Exception, match="do not fit"):
        run(op, x, ["int64"] if op == "BestPages" else ["float32"] * 2, **settings)
