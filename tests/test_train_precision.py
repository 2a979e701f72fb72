"""Training with products in bfloat16."""

import pytest
import torch
from torch.nn import functional as F

from accel.compiler.train.options import TrainOptions
from accel.compiler.train.precision import products_in
from accel.ir.errors import InputError

X, W, BIAS = torch.randn(3, 5), torch.randn(4, 5, requires_grad=True), torch.randn(4)


def rounded(*tensors):
    return [one.bfloat16().float() for one in tensors]


@pytest.mark.parametrize("linear", [F.linear, torch.ops.aten.linear.default])
def test_products_are_rounded_and_nothing_else(linear):
    with products_in("bfloat16"):
        y = linear(X, W, BIAS)
        assert torch.equal(X @ W.T, X @ W.T.clone()), "a product without weights of its own stays"
    x, w, bias = rounded(X, W, BIAS)
    torch.testing.assert_close(y, F.linear(x, w, bias), rtol=2**-7, atol=2**-7)
    assert y.dtype == torch.float32
    assert not torch.equal(y, F.linear(X, W, BIAS)), "the control: it rounds"
    with products_in("float32"):
        assert torch.equal(linear(X, W, BIAS), F.linear(X, W, BIAS))
    y.sum().backward()
    assert W.grad.dtype == torch.float32


def test_a_precision_that_is_not_there_is_named():
    with pytest.raises(InputError, match="bfloat16"):
        TrainOptions(precision="bfloat")
