"""Expected Attention: the formula, and what the paper says of it."""

import matrix
import numpy as np
import pytest
import torch

from accel.ir.errors import RecipeError
from accel.passes.kv.score.expected_attention import ExpectedAttention

from .kv_slots import SCALE, G, R, build, named, slots


def brute(x, sinks, epsilon, covariance=True):
    """Head by head, in double precision."""
    found = np.zeros(x["positions"].shape)
    for row, group in np.ndindex(found.shape[:2]):
        real = np.flatnonzero(x["positions"][row, group] >= sinks)
        k = x["keys"][row, group, real].double().numpy()
        shares = []
        for head in range(group * R, (group + 1) * R):
            z = SCALE * k @ x["query_mean"][row, head].double().numpy()
            if covariance:
                sigma = x["query_covariance"][row, head].double().numpy()
                z += SCALE**2 / 2 * np.einsum("si,ij,sj->s", k, sigma, k)
            shares.append(np.exp(z - z.max()) / np.exp(z - z.max()).sum())
        norm = np.linalg.norm(x["values"][row, group, real].double().numpy(), axis=-1)
        found[row, group, real] = (np.mean(shares, 0) + epsilon) * norm
    return found


@pytest.mark.parametrize("sinks, epsilon", [(0, 0.0), (4, 0.02)])
def test_it_is_the_mean_of_what_gaussian_queries_pay(sinks, epsilon):
    x = named(slots(0))
    method = ExpectedAttention(sinks=sinks, epsilon=epsilon)
    found = method(**{n: x[n] for n in method.reads - {"self"}})
    np.testing.assert_allclose(found, brute(x, sinks, epsilon), rtol=1e-3, atol=1e-6)
    assert not np.allclose(found, brute(x, sinks, epsilon, covariance=False), atol=1e-3)
    assert found.shape[1] == G


def test_without_spread_it_is_the_attention_of_the_mean_query():
    x = named(slots(1))
    x["query_covariance"] = torch.zeros_like(x["query_covariance"])
    method = build("score", "expected-attention")
    found = method(**{n: x[n] for n in method.reads - {"self"}})
    np.testing.assert_allclose(found, brute(x, 2, 0.0, covariance=False), rtol=1e-3, atol=1e-6)


def test_an_expectation_of_exponentials():
    """exp(k^T mu + k^T Sigma k / 2) is the mean of exp(k^T q) over Gaussian q."""
    r = torch.Generator().manual_seed(0)
    root, mean = torch.randn(4, 4, generator=r) / 2, torch.randn(4, generator=r)
    k = torch.randn(6, 4, generator=r)
    drawn = mean + torch.randn(200_000, 4, generator=r) @ root.T
    payed = (drawn @ k.T).exp().mean(0)
    method = ExpectedAttention(sinks=0)
    x = k[None, None], torch.ones(1, 1, 6, 1), torch.arange(6)[None, None]
    found = method(mean[None, None], (root @ root.T)[None, None], *x, 1.0)[0, 0]
    torch.testing.assert_close(found, payed / payed.sum(), atol=5e-3, rtol=5e-2)


@pytest.mark.parametrize(
    "options, words",
    [
        ({"future": 0}, "future is 0"),
        ({"sinks": -1}, "sinks -1"),
        ({"epsilon": -0.1}, "epsilon is -0.1"),
        ({"epsilon": float("nan")}, "epsilon is nan"),
    ],
)
def test_bad_options_are_refused(options, words):
    with pytest.raises(RecipeError, match=words):
        build("score", "expected-attention", **options)


@pytest.mark.long
def test_onnx_equals_the_oracle():
    case = matrix.Case("llama", (("kv.score", "expected-attention"),))
    outcome = matrix.Matrix().run(case)
    assert outcome.kind == "equal", outcome.why
