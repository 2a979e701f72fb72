"""CapKV: the formula, and what must hold of it."""

import matrix
import numpy as np
import pytest
import torch

from accel.ir.errors import RecipeError
from accel.passes.kv.score.capkv import CapKV

from ....kv_slots import R, build, named, slots


def brute(x, sinks, tau):
    """Scores, and per head the sum of (w + 1e-6) v^T A^-1 v and the trace of I - A^-1; in double precision."""
    found, sums = np.zeros(x["positions"].shape), []
    for row, group in np.ndindex(found.shape[:2]):
        real = np.flatnonzero(x["positions"][row, group] >= sinks)
        k, v = (x[n][row, group, real].double().numpy() for n in ("keys", "values"))
        for head in range(group * R, (group + 1) * R):
            mean = x["query_mean"][row, head].double().numpy()
            cosine = k @ mean / np.linalg.norm(mean) / np.linalg.norm(k, axis=-1)
            w = np.exp(tau * (cosine - cosine.max()))
            inverse = np.linalg.inv(np.eye(v.shape[1]) + (v.T * (w + 1e-6)) @ v)
            own = np.einsum("si,ij,sj->s", v, inverse, v)
            found[row, group, real] += w * own / R
            sums.append((((w + 1e-6) * own).sum(), np.trace(np.eye(len(inverse)) - inverse)))
    return found, np.array(sums)


@pytest.mark.parametrize("sinks, tau", [(0, 5.0), (4, 5.0), (2, 0.0)])
def test_it_is_the_weighted_leverage_of_values(sinks, tau):
    x, method = named(slots(0)), CapKV(sinks=sinks, tau=tau)
    found = method(**{n: x[n] for n in method.reads - {"self"}})
    want, sums = brute(x, sinks, tau)
    np.testing.assert_allclose(found, want, atol=2e-3, rtol=1e-3)
    np.testing.assert_allclose(*sums.T, atol=1e-6)
    assert not np.allclose(found, brute(x, sinks, tau + 3)[0], atol=1e-2), "the control"


def test_without_tau_queries_and_keys_count_for_nothing():
    x, method = named(slots(1)), CapKV(tau=0.0, sinks=0)
    found = method(x["query_mean"], x["keys"], x["values"], x["positions"])
    other = method(-x["query_mean"], x["keys"] * 3, x["values"], x["positions"])
    torch.testing.assert_close(found, other)
    sharp = CapKV(sinks=0)
    loud = sharp(x["query_mean"], x["keys"] * 3, x["values"], x["positions"])
    torch.testing.assert_close(
        loud, sharp(*(x[n] for n in ("query_mean", "keys", "values", "positions")))
    )
    assert not torch.allclose(loud, found, atol=1e-2)


@pytest.mark.parametrize(
    "options, words",
    [
        ({"future": 0}, "future is 0"),
        ({"sinks": -1}, "sinks is -1; give at least 0"),
        ({"tau": -1.0}, "tau is -1.0; give 0 to 10000"),
        ({"tau": float("inf")}, "tau is inf"),
    ],
)
def test_bad_options_are_refused(options, words):
    with pytest.raises(RecipeError, match=words):
        build("score", "capkv", **options)


@pytest.mark.long
def test_onnx_equals_the_oracle():
    outcome = matrix.Matrix().run(matrix.Case("llama", (("kv.score", "capkv"),)))
    assert outcome.kind == "equal", outcome.why
