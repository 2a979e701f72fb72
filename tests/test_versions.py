"""Strides as versions of PyTorch before 2.12 write them: the smaller one is named without a guard where it is known."""

import pytest
import torch
from torch._dynamo.source import ConstantSource
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv, StatelessSymbolicContext

from accel.ir import versions


@pytest.fixture
def size():
    """A symbolic number of tokens, and what guards it."""
    env = ShapeEnv()
    x = FakeTensorMode(shape_env=env).from_tensor(
        torch.zeros(7),
        source=ConstantSource("x"),
        symbolic_context=StatelessSymbolicContext(
            dynamic_sizes=[torch.fx.experimental.symbolic_shapes.DimDynamic.DYNAMIC]
        ),
    )
    return x.shape[0], env


def test_the_smaller_stride_is_named_without_a_guard(size):
    t, env = size
    assert (
        str(versions._smaller(10 * t, 30 * t))
        == str(versions._smaller(30 * t, 10 * t))
        == str(10 * t)
    )
    assert versions._smaller(3, 2) == 2
    assert "Min" in str(versions._smaller(t, 9)), "unknown: both stay"
    assert not env.guards
