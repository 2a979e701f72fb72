"""Strides as versions of PyTorch before 2.12 write them: the smaller one is named without a guard where it is known."""

import pytest
import sympy
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


def test_arithmetic_on_sizes_is_remembered_as_it_would_be_done(size, monkeypatch):
    """Also what a replacement changes; each result is one of its own, for the tracer tells sizes apart by identity."""
    t, env = size
    computed, real = [], versions.SymNode._mul
    monkeypatch.setattr(versions.SymNode, "_mul", lambda *two: computed.append(two) or real(*two))

    def results():
        return [t * 3, t * (t * 3), t == 7, t < 9, torch.sym_max(t, 3)]

    want = [str(one) for one in results()]
    count = len(computed)
    with versions.remembered_sizes():
        first, again = results(), results()
        assert [str(one) for one in first] == [str(one) for one in again] == want
        assert len(computed) == count + 2, "t * 3 and t * t * 3, once each"
        assert all(a.node is not b.node for a, b in zip(first, again, strict=True))
        assert (t * 3) * 2 == t * 6 and not isinstance(t * 3, int)
        env._set_replacement(t.node.expr, sympy.Integer(7), "test")
        assert t * 3 == 21
    assert versions.SymNode._mul is not real and len(results()) == 5
