"""Operators over the last axis of a token on the Triton target, beside their references."""

import numpy as np
import pytest
import torch

from accel.ir.ops import norm
from accel.ir.ties import topk
from accel.lowering.triton import lowered

from ..op_case import randn
from .triton_case import Walls, close, poisoned

lowered._load_rules()

from accel.lowering.triton.rules import accel_rest  # noqa: E402  (it imports triton)

ROWS = [(1, 1, 10), (3, 5, 64), (8, 1, 70), (1, 17, 1500)]


@pytest.fixture
def walls():
    found = Walls()
    yield found
    found.check()


@pytest.mark.few(2)
@pytest.mark.parametrize("shape", ROWS, ids=str)
def test_a_residual_and_its_norm(shape, walls):
    rng = np.random.default_rng(0)
    x, y, weight = randn(rng, *shape), randn(rng, *shape), randn(rng, shape[-1])
    x[0, 0, 3] = 50
    with poisoned():
        got = accel_rest.add_rms_norm(*walls.around((x, y, weight)), 1e-5)
    want = norm.add_rms_norm(x, y, weight, 1e-5)
    for one, other in zip(got, want, strict=True):
        close(one.cpu(), other)
    assert not torch.allclose(norm.add_rms_norm(x, y, weight, 9.0)[0], want[0], atol=1e-3)


@pytest.mark.few(3)
@pytest.mark.parametrize("shape", ROWS, ids=str)
@pytest.mark.parametrize("act", sorted(norm.ACTIVATIONS))
def test_a_gate(act, shape, walls):
    rng = np.random.default_rng(0)
    x, up = randn(rng, *shape) * 4, randn(rng, *shape)
    x[0, 0, :3] = torch.tensor([100.0, -100.0, torch.nan])
    with poisoned():
        got = accel_rest.gate(*walls.around((x, up)), act).cpu()
    want = norm.gate(x, up, act)
    torch.testing.assert_close(got, want, atol=2e-5, rtol=2e-5, equal_nan=True)
    assert want.isnan().sum() == 1


def test_a_gate_of_parts_of_one_tensor():
    both = randn(np.random.default_rng(0), 2, 3, 20)
    x, up = both.chunk(2, dim=-1)
    close(accel_rest.gate(x, up, "silu"), norm.gate(x, up, "silu"))


@pytest.mark.few(3)
@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize(
    "rows,width,k", [(1, 1, 1), (3, 9, 9), (2, 128, 8), (1, 5000, 5), (2, 4097, 64), (8, 70, 65)]
)
def test_the_largest_numbers_and_of_equal_ones_the_first(rows, width, k, largest, walls):
    rng = np.random.default_rng(width)
    x = (randn(rng, rows, width) * 3).round()  # many are equal
    for number in (torch.nan, torch.inf, -torch.inf, -0.0):
        x[torch.from_numpy(rng.random(x.shape) < 0.02)] = number
    (inside,) = walls.around((x,))
    with poisoned():
        values, places = accel_rest.few_largest(inside, min(k, width), -1, largest)
    want = topk(x, min(k, width), -1, largest)
    assert torch.equal(places.cpu(), want[1])
    torch.testing.assert_close(values.cpu(), want[0], atol=0, rtol=0, equal_nan=True)


def test_another_order_of_equals_is_seen():
    x = torch.zeros(1, 20)
    x[0, 7] = 1
    values, places = accel_rest.few_largest(x, 3)
    assert places.tolist() == [[7, 0, 1]] and values.tolist() == [[1, 0, 0]]
    assert torch.equal(accel_rest.few_largest(x, 3)[1], topk(x, 3)[1])
    assert not torch.equal(accel_rest.few_largest(x.flip(1), 3)[1], places)
