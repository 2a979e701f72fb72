"""Laws of weights that are rounded by what they read: they err less there, and exact ones stay exact."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from accel.ir.errors import PassError
from accel.passes.weights import _scaling
from accel.passes.weights._blocks import round_to_nearest
from accel.passes.weights._feedback import feedback_of, round_with_feedback
from accel.passes.weights._scaling import channel_scales, round_clipped

TOKENS = 400
sizes = st.fixed_dictionaries(
    {
        "rows": st.integers(1, 20),
        "columns": st.integers(20, 150),
        "block": st.sampled_from([16, 32]),
        "bits": st.sampled_from([4, 8]),
        "symmetric": st.booleans(),
        "seed": st.integers(0, 10**6),
    }
)


def case(rows, columns, block, bits, symmetric, seed):
    """A weight, and inputs of few causes, so that their channels are correlated."""
    torch.manual_seed(seed)
    causes = torch.randn(TOKENS, columns // 8 + 1)
    inputs = causes @ torch.randn(causes.shape[1], columns) + 0.1 * torch.randn(TOKENS, columns)
    return torch.randn(rows, columns), inputs, (bits, block, symmetric)


def read(packed, columns):
    """The numbers that were packed, [N,K]."""
    return packed.weight()[:, :columns]


def harm(weight, packed, inputs):
    """Squared error of the products."""
    off = read(packed, weight.shape[1]) - weight
    return float((inputs @ off.t()).square().sum())


@settings(max_examples=40, deadline=None)
@given(sizes)
def test_feedback_errs_less_where_inputs_are_correlated(size):
    """Over rows: of a single one, 10 in 6000 err as much or more, since a greedy choice may."""
    weight, inputs, how = case(**{**size, "rows": size["rows"] + 7})
    order, factor = feedback_of(inputs, 0.01)
    fed = harm(weight, round_with_feedback(weight, order, factor, *how), inputs)
    assert fed < harm(weight, round_to_nearest(weight, *how), inputs)


def test_feedback_of_the_wrong_sign_errs_more():
    weight, inputs, how = case(16, 96, 32, 4, True, 1)
    order, factor = feedback_of(inputs, 0.01)
    wrong = 2 * factor.diag().diag() - factor
    fed = harm(weight, round_with_feedback(weight, order, wrong, *how), inputs)
    assert fed > harm(weight, round_to_nearest(weight, *how), inputs)


@settings(max_examples=20, deadline=None)
@given(sizes)
def test_weights_on_the_grid_stay(size):
    weight, inputs, how = case(**size)
    weight = read(round_to_nearest(weight, *how), weight.shape[1])
    fed = round_with_feedback(weight, *feedback_of(inputs, 0.01), *how)
    for packed in (fed, round_clipped(weight, inputs, *how)):
        torch.testing.assert_close(read(packed, weight.shape[1]), weight, rtol=1e-5, atol=1e-5)


@settings(max_examples=20, deadline=None)
@given(sizes)
def test_uncorrelated_inputs_are_rounded_to_nearest(size):
    """Without correlation there is nothing to make good an error with."""
    weight, _, how = case(**size)
    inputs = torch.eye(weight.shape[1])
    fed = round_with_feedback(weight, *feedback_of(inputs, 0.01), *how)
    nearest = round_to_nearest(weight, *how)
    torch.testing.assert_close(fed.q, nearest.q, rtol=0, atol=0)
    torch.testing.assert_close(fed.scales, nearest.scales)


@pytest.mark.parametrize("inputs", [torch.zeros(30, 40), torch.ones(1, 40)], ids=["none", "one"])
def test_inputs_that_tell_little_do_no_harm(inputs):
    weight = torch.randn(8, 40)
    order, factor = feedback_of(inputs, 0.01)
    for packed in (
        round_with_feedback(weight, order, factor, 4, 32, True),
        round_clipped(weight, inputs, 4, 32, True),
    ):
        assert (read(packed, 40) - weight).abs().max() < 2.5


def test_inputs_that_are_not_finite_are_refused():
    with pytest.raises(PassError, match="not finite"):
        feedback_of(torch.tensor([[1.0, float("inf")]]), 0.01)


def test_the_factor_is_of_the_inverse():
    _, inputs, _ = case(4, 60, 16, 4, True, 2)
    order, factor = feedback_of(inputs, 0.01)
    moments = (inputs.t() @ inputs)[order][:, order]
    moments += 0.01 * moments.diagonal().mean() * torch.eye(60)
    torch.testing.assert_close(factor.t() @ factor @ moments, torch.eye(60), atol=2e-3, rtol=0)
    assert torch.equal(factor, factor.triu())


@settings(max_examples=40, deadline=None)
@given(sizes)
def test_clipping_never_errs_more_in_a_block(size):
    weight, inputs, (bits, block, symmetric) = case(**size)
    weight, inputs = weight[:, :block], inputs[:, :block]  # one block: its error is the product's
    clipped = harm(weight, round_clipped(weight, inputs, bits, block, symmetric), inputs)
    nearest = harm(weight, round_to_nearest(weight, bits, block, symmetric), inputs)
    assert clipped <= nearest * (1 + 1e-4)


def loud(seed=3, columns=96):
    """A weight, and inputs of which few channels are far larger than the others."""
    torch.manual_seed(seed)
    size = torch.ones(columns)
    size[torch.randperm(columns)[:6]] = 40.0
    return torch.randn(24, columns), torch.randn(TOKENS, columns) * size


def nearest(weight):
    return round_to_nearest(weight, 4, 32, True)


def scaled_harm(weight, inputs, scale):
    """The error of the products with columns scaled, and inputs by as much less."""
    packed = nearest(weight * scale)
    off = F.linear(inputs / scale, read(packed, weight.shape[1])) - F.linear(inputs, weight)
    return float(off.square().sum())


@pytest.mark.parametrize("seed", range(4))
def test_scales_help_where_channels_are_loud(seed):
    weight, inputs = loud(seed)
    scale = channel_scales(inputs, [weight], torch.arange(96), 96, nearest)
    assert scale is not None
    plain = harm(weight, nearest(weight), inputs)
    assert scaled_harm(weight, inputs, scale) < 0.5 * plain
    assert scaled_harm(weight, inputs, 1 / scale) > plain


def test_channels_of_one_entry_share_its_scale():
    weight, inputs = loud()
    scale = channel_scales(inputs, [weight, -weight], torch.arange(96) // 2, 50, nearest)
    assert scale is not None and scale.shape == (50,)
    assert torch.equal(scale[48:], torch.ones(2))  # which no channel follows


def test_channels_that_are_alike_are_left(monkeypatch):
    """Where every channel is as loud, all powers give one scale, and the first is kept: none."""
    weight = torch.randn(8, 64)
    inputs = torch.ones(50, 64) * torch.tensor([1.0, -1.0]).repeat(25)[:, None]
    assert channel_scales(inputs, [weight], torch.arange(64), 64, nearest) is None
    monkeypatch.setattr(_scaling, "_POWERS", (0.5,))
    assert channel_scales(inputs, [weight], torch.arange(64), 64, nearest) is not None
