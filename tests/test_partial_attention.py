"""Partial attention: results over parts of the keys, merged by their log-sum-exp, are the result over all of them."""

import numpy as np
import pytest
import torch

from accel.ir.ops.attention import attention, merge_attention, partial_attention

from .attention_cases import attend

LEAST = torch.finfo(torch.float32).min
FORMS = [("causal", 0, 4, 0.0), ("window", 4, 2, 0.0), ("chunk", 3, 1, 0.7), ("full", 0, 2, 0.0)]


def operands(mask, size, groups, cap):
    return attend(mask, size, 4, groups, None, cap)(3, 5, 24, np.random.default_rng(7))


def part(made, first, last):
    """The operands over some of the slots."""
    q, k, v, q_pos, k_pos, *rest = made
    return [q, k[:, :, first:last], v[:, :, first:last], q_pos, k_pos[:, first:last], *rest]


def seen(made):
    """Results [B,H,T] of queries that see a key."""
    return (partial_attention(*made)[1] > LEAST / 2).expand(-1, 4, -1)


def merged(made, cuts):
    parts = [
        partial_attention(*part(made, a, b)) for a, b in zip([0, *cuts], [*cuts, 24], strict=True)
    ]
    found = parts[0]
    for other in parts[1:]:
        found = merge_attention(*found, *other)
    return found


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("cuts", [[11], [1], [5, 6, 20]], ids=str)
def test_parts_of_the_keys_merge_to_the_whole(form, cuts):
    made = operands(*form)
    want, lse = partial_attention(*made)
    got, got_lse = merged(made, cuts)
    real = seen(made)
    assert real.sum() > 20
    torch.testing.assert_close(got[real], want[real], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(got_lse[real], lse[real], atol=1e-5, rtol=1e-5)
    assert got.isfinite().all() and got_lse.isfinite().all()


def test_a_merge_by_equal_shares_is_caught():
    made = operands(*FORMS[0])
    (a, _), (b, _) = (partial_attention(*part(made, *ends)) for ends in ((0, 11), (11, 24)))
    want, real = attention(*made), seen(made)
    assert ((a + b) / 2 - want)[real].abs().max() > 0.05


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_attention_takes_a_partial_result_in(form):
    """Any order of parts, one of them merged by `attention` itself."""
    made = operands(*form)
    real, want = seen(made), attention(*made)
    for ends in [((0, 9), (9, 24)), ((9, 24), (0, 9))]:
        out, lse = partial_attention(*part(made, *ends[0]))
        got = attention(*part(made, *ends[1]), beside=out, beside_lse=lse)
        torch.testing.assert_close(got[real], want[real], atol=1e-5, rtol=1e-5)


def test_a_part_that_read_nothing_changes_no_bit():
    made = operands(*FORMS[0])
    nothing = torch.randn(3, 4, 5, 6), torch.full((3, 4, 5), LEAST)
    real, want = seen(made), partial_attention(*made)
    got = merge_attention(*want, *nothing)
    assert torch.equal(got[0][real], want[0][real]) and torch.equal(got[1][real], want[1][real])
    out = attention(*made, beside=nothing[0], beside_lse=nothing[1])
    torch.testing.assert_close(out[real], want[0][real], atol=1e-6, rtol=1e-6)
    none = merge_attention(nothing[0], -torch.inf * torch.ones(3, 4, 5), *nothing)
    assert none[0].isfinite().all() and none[1].isfinite().all()
