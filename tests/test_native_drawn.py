"""What slots draw, of compiled attention: that of the reference, over many chunks, blocks of rows and threads."""

import itertools

import numpy as np
import pytest
import torch

from accel.ir.ops.attention import attention
from accel.ir.ops.mass import drawn_attention
from accel.lowering.onnx import native

from .test_native_int8 import keys, run

pytestmark = pytest.mark.skipif(native.library()[0] is None, reason=native.library()[1])
MASKS, SLOTS, KEPT = ("causal", "window"), 300, 40
SHAPES = [(4, 4, 64), (10, 1, 24), (6, 2, 10), (33, 1, 8)]


def operands(rng, shape, tokens, mask, kept, coded=False):
    """Of DrawnAttention before the shares, and of the reference over the same; ragged rows, one with padding."""
    heads, groups, size = shape
    q = rng.standard_normal((2, heads, tokens, size)).astype(np.float32)
    k, v, old_k, old_v = (
        keys(rng, groups, width, slots)[1:] for slots in (SLOTS, KEPT) for width in (size, size + 3)
    )
    held = np.tile(np.arange(SLOTS), (2, 1))
    held[0, -40:], held[1, 5:9] = -1, -1
    q_pos = np.stack([np.arange(tokens) + SLOTS - 40 - tokens, np.arange(tokens) + 100])
    q_pos[1, tokens // 2 + 1 :] = -1
    places = np.where(rng.random((2, groups, KEPT)) < 0.8, np.arange(KEPT), -1)
    which = 0 if coded else 2
    old = [old_k[which], old_v[which], places] if kept else [None] * 3
    scales = [k[1], v[1], *([old_k[1], old_v[1]] if kept else [None] * 2)] if coded else []
    given = [q, k[which], v[which], q_pos, held, None, None, *old, None, *scales, *[None] * 7]
    settings = dict(scale=0.3, softcap=0.0, mask=MASKS.index(mask), window=90)
    settings |= dict(exact=0, packed=0, page=0, partial=0)
    want = [q, k[2], v[2], q_pos, held, None, 0.3, 0.0, mask, 90, None]
    want += [old_k[2], old_v[2], places] if kept else [None] * 3
    want = [torch.from_numpy(x) if isinstance(x, np.ndarray) else x for x in want]
    return given, settings, want


def both(made, more, noise, threads=0):
    """What the operator and the reference give: attention, and what slots draw."""
    given, settings, want = made
    op = "DrawnAttentionInt8" if given[1].dtype == np.int8 else "DrawnAttention"
    types = ["float32"] * 3
    out, _, got = run(op, [*given, *more], types, threads, noise=noise, seed=5, **settings)
    extra = [None if x is None else torch.from_numpy(x) for x in more]
    names = ("share", "temperature", "layer")
    right = drawn_attention(*want, **dict(zip(names, extra, strict=True)), noise=noise, seed=5)
    return out, attention(*want).numpy(), got, right.numpy()


def asked(rng, tokens, noise):
    """Shares, and where there is noise temperatures and a layer."""
    share = (rng.random((2, tokens)) * 2).round(1).astype(np.float32)
    if noise is None:
        return [share, None, None]
    return [share, rng.uniform(0.5, 2, 2).astype(np.float32), np.array(3)]


@pytest.mark.few(1)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_what_slots_draw_is_the_references(shape):
    rng = np.random.default_rng(sum(shape))
    for tokens, kept, noise in itertools.product((1, 5, 70), (False, True), (None, 0.0, 1.0)):
        mask = MASKS[(tokens + kept) % 2]
        more = asked(rng, tokens, noise)
        made = operands(rng, shape, tokens, mask, kept)
        out, want, got, right = both(made, more, noise or 0.0)
        real = (made[0][3] >= 0)[:, None, :, None]
        np.testing.assert_allclose(out * real, want * real, atol=2e-5)
        np.testing.assert_allclose(got, right, atol=5e-5, rtol=5e-5)
    more = asked(rng, 5, 1.0)
    made = operands(rng, shape, 5, "causal", True)
    right = both(made, more, 1.0)[2]
    wrong = [more[0], more[1] * 1.5, more[2]]
    assert np.abs(both(made, wrong, 1.0)[2] - right).max() > 1e-3, "the control"
    assert np.abs(both(made, [*more[:2], np.array(4)], 1.0)[2] - right).max() > 1e-3


@pytest.mark.parametrize("noise", [None, 0.5])
def test_heads_that_keep_unequal_numbers_draw_in_their_own_slots(noise):
    """Of slots one head's after another's; counts of other heads are the control."""
    rng = np.random.default_rng(4)
    given, settings, want = operands(rng, SHAPES[2], 5, "causal", True)
    counts = np.array([[27, 9], [0, 40]])
    flat = [given[i][:, :1].copy() for i in (7, 8, 9)]
    for cut in (counts, counts[:, ::-1].copy()):
        made = [*given[:7], *flat, *given[10:-3], cut, None, None], settings, list(want)
        made[2][11:14] = [torch.from_numpy(x) for x in flat]
        more = asked(np.random.default_rng(5), 5, noise)
        extra = dict(
            zip(("share", "temperature", "layer"), map(_tensor, more), strict=True),
            kept_counts=torch.from_numpy(counts),
        )
        right = drawn_attention(*made[2], **extra, noise=noise or 0.0, seed=5).numpy()
        got = run(
            "DrawnAttention",
            [*made[0], *more],
            ["float32"] * 3,
            0,
            noise=noise or 0.0,
            seed=5,
            **settings,
        )[2]
        same = np.allclose(got, right, atol=5e-5, rtol=5e-5)
        assert same == (cut is counts)
    assert (right[0, 0, 27:36] == 0).all() and (right[0, 1, :27] == 0).all()


def _tensor(x):
    return None if x is None else torch.from_numpy(x)


@pytest.mark.parametrize("noise", [None, 1.0])
def test_codes_draw_what_they_stand_for(noise):
    for shape, kept in itertools.product(SHAPES[:2], (False, True)):
        more = asked(np.random.default_rng(1), 5, noise)
        plain, coded = (
            both(
                operands(np.random.default_rng(0), shape, 5, "causal", kept, c), more, noise or 0.0
            )
            for c in (False, True)
        )
        np.testing.assert_array_equal(plain[2], coded[2])


@pytest.mark.parametrize("noise", [None, 1.0])
def test_a_query_that_is_no_number_spoils_what_its_group_draws(noise):
    rng = np.random.default_rng(2)
    made = operands(rng, SHAPES[0], 70, "causal", True)
    made[0][0][0, 1, 3, 0] = np.nan  # head 1 of row 0
    share = np.ones((2, 70), np.float32)
    _, _, got, right = both(made, [share, *asked(rng, 70, noise)[1:]], noise or 0.0)
    assert np.isnan(got).all(2).tolist() == np.isnan(right).all(2).tolist()
    assert np.isnan(got).all(2).sum() == 1 and np.isnan(got).any(2).sum() == 1
    np.testing.assert_allclose(got, right, atol=5e-5, rtol=5e-5)


@pytest.mark.long
def test_threads_draw_the_same():
    rng = np.random.default_rng(3)
    for shape in SHAPES:
        made, more = operands(rng, shape, 70, "causal", True), asked(rng, 70, 1.0)
        alone, many = (both(made, more, 1.0, threads)[2] for threads in (1, 4))
        np.testing.assert_array_equal(alone, many)


@pytest.mark.parametrize(
    "changed", [lambda m: [m[0][:, :-1], *m[1:]], lambda m: [m[0], m[1][:1], m[2]]]
)
def test_shares_that_do_not_fit_are_an_error(changed):
    rng = np.random.default_rng(4)
    made, more = operands(rng, SHAPES[0], 5, "causal", True), asked(rng, 5, 1.0)
    more = [np.ascontiguousarray(x) for x in changed(more)]
    types = ["float32"] * 3
    with pytest.raises(Exception, match="do not fit"):
        run("DrawnAttention", [*made[0], *more], types, noise=1.0, seed=5, **made[1])
