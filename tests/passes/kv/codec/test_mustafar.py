"""Mustafar: of each token the largest numbers, and the newest tokens whole."""

import numpy as np
import pytest
import torch

from accel.ir.axis import find_axes
from accel.passes.kv.codec import At

from ....prefill_case import TOKENS, built
from ....refused import refuses

AXIS = find_axes()["kv.codec"]


def numbers(width=50, seed=0):
    """Two blocks [1,1,2,R,width], without two of one size."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(1, 1, 2, 32, width, generator=generator)


def read(x, **options):
    method = AXIS.build("mustafar", **options)
    at = At("k", x.shape[-1])
    return method.decode(at, method.encode(at, x)).unflatten(2, (-1, 32))


@pytest.mark.parametrize(("sparsity", "stay"), [(0.7, 15), (0.5, 25), (0.99, 1)])
def test_the_largest_of_each_token_stay_in_their_places(sparsity, stay):
    """ceil((1 - s) D), by sorting; the release's threshold lets one more stay."""
    x = numbers()
    want = torch.zeros_like(x)
    for token in np.ndindex(x.shape[:-1]):
        largest = sorted(range(50), key=lambda i: -abs(float(x[token][i])))[:stay]
        want[token][largest] = x[token][largest].half().float()
    assert torch.equal(read(x, sparsity=sparsity), want)


def test_no_choice_of_as_many_is_nearer():
    x = numbers()
    lost = (read(x) - x).norm()
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        other = torch.rand(x.shape, generator=generator).topk(15, dim=-1).indices
        picked = torch.zeros_like(x).scatter(-1, other, x.gather(-1, other))
        assert lost < (picked - x).norm()


def test_equal_numbers_leave_as_many():
    x = torch.full((1, 1, 1, 32, 10), -2.0)
    assert torch.equal((read(x, sparsity=0.5) != 0).sum(-1), torch.full((1, 1, 1, 32), 5))


def test_of_equal_numbers_only_the_first_stay_beside_larger_ones():
    x = torch.tensor([1.0, -1, 1, 1, -1, 1, 2, 3, -2, 2]).expand(1, 1, 1, 32, 10)
    want = torch.tensor([1.0, 0, 0, 0, 0, 0, 2, 3, -2, 2]).expand_as(x)
    assert torch.equal(read(x, sparsity=0.5), want)


def logits(tokens, **codec):
    tables = {"kv.codec": {"use": "mustafar", "recent": 8, **codec}} if codec else {}
    with built("llama", tables=tables).session() as session:
        return np.concatenate(
            [session.prompt(TOKENS[:1, :tokens]), session.run(TOKENS[:1, [tokens]])], 1
        )


def test_the_newest_tokens_are_whole():
    """Below two blocks nothing is encoded; beyond, something is lost (the control)."""
    assert np.allclose(logits(14, sparsity=0.7), logits(14), atol=1e-6)
    assert np.abs(logits(30, sparsity=0.7) - logits(30)).max() > 1e-3


def test_without_sparsity_only_float16_is_lost():
    assert np.allclose(logits(30, sparsity=0.0), logits(30), atol=2e-2)
    assert np.abs(logits(30, sparsity=0.7) - logits(30)).max() > 0.1  # the control


test_what_makes_no_sense_is_refused = refuses(
    "kv.codec.mustafar", {"sparsity": 1.0}, {"sparsity": -0.1}, {"recent": 0}
)
