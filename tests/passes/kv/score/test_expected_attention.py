"""Expected Attention: the formula, and what the paper says of it."""

from dataclasses import replace

import matrix
import numpy as np
import pytest
import torch

from accel.compiler.over_state import keys_of
from accel.ir.errors import PassError, RecipeError
from accel.ir.ops.attention import Form
from accel.ir.tables import Observed, Rows
from accel.passes.kv._shared.tables import measured
from accel.passes.kv.inputs.mean_rotation import MeanRotation
from accel.passes.kv.score.expected_attention import ExpectedAttention
from accel.passes.kv.score.expected_attention_stats import ExpectedAttentionStats
from accel.passes.trained import sample, write

from ....kv_case import evicting, kept, recipe, state
from ....kv_slots import SCALE, D, G, R, build, named, slots


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
    found = method(mean[None, None], (root @ root.T)[None, None], *x, Form("causal"))[0, 0]
    torch.testing.assert_close(found, payed / payed.sum(), atol=5e-3, rtol=5e-2)


def law_of_a_cap_and_a_sink(form, drawn_by):
    r = torch.Generator().manual_seed(0)
    root, mean = torch.randn(4, 4, generator=r), torch.randn(4, generator=r)
    k, sink = torch.randn(6, 4, generator=r), torch.tensor([1.5])
    drawn = mean + torch.randn(200_000, 4, generator=r) @ root.T
    payed = (drawn_by.softcap * torch.tanh(drawn @ k.T * drawn_by.scale / drawn_by.softcap)).exp()
    want = payed.mean(0) / (payed.mean(0).sum() + sink.exp())
    x = k[None, None], torch.ones(1, 1, 6, 1), torch.arange(6)[None, None]
    moments, form = (mean[None, None], (root @ root.T)[None, None]), replace(form, sink=sink)
    found = ExpectedAttention(sinks=0)(*moments, *x, form)[0, 0]
    torch.testing.assert_close(found, want, atol=5e-3, rtol=5e-2)


def test_the_expectation_is_of_capped_scores_beside_a_sink():
    form = Form("causal", scale=0.7, softcap=2.0)
    law_of_a_cap_and_a_sink(form, form)
    for other in (replace(form, softcap=0.0), replace(form, scale=0.2)):
        with pytest.raises(AssertionError):
            law_of_a_cap_and_a_sink(other, form)


@pytest.mark.parametrize(
    "options, words",
    [
        ({"future": 0}, "future is 0"),
        ({"sinks": -1}, "sinks is -1; give at least 0"),
        ({"epsilon": -0.1}, "epsilon is -0.1"),
        ({"epsilon": float("nan")}, "epsilon is nan"),
    ],
)
def test_bad_options_are_refused(options, words):
    with pytest.raises(RecipeError, match=words):
        build("score", "expected-attention", **options)


# By a table


def test_the_table_is_the_moments_of_all_rows_without_their_sinks():
    r = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 4, 9, D, generator=r) + 2, torch.randn(2, G, 9, D, generator=r)
    rows = [Rows(None, None, {3: Observed(k, k, k, 1.0, None, q[[i]])}) for i in (0, 1)]
    found = ExpectedAttentionStats(sinks=2).measure(rows)[3]
    for head in range(4):
        own = q[:, head, 2:].reshape(-1, D).double().numpy()
        np.testing.assert_allclose(found["mean"][head], own.mean(0), rtol=1e-5)
        np.testing.assert_allclose(found["covariance"][head], np.cov(own.T, bias=True), atol=1e-5)
    plain = [Rows(None, None, {3: Observed(q, k, k, 1.0)})]
    without = ExpectedAttentionStats(sinks=2).measure(plain)[3]
    assert torch.equal(found["mean"], without["mean"]), "a model without rotation"
    assert not torch.equal(found["mean"], ExpectedAttentionStats(sinks=0).measure(plain)[3]["mean"])


def by_table(program, text, file):
    """A program that evicts by the moments of a text."""
    small = ExpectedAttentionStats.small
    method = ExpectedAttentionStats(**small)
    parts = measured(method, program, [(torch.from_numpy(text), torch.ones(1, text.shape[1] - 1))])
    write(method, file, parts, sample(program, keys_of(program)), {})
    score = {"use": "expected-attention-stats", "table": str(file), **small}
    return evicting(program, {**recipe("expected-attention"), "kv.score": score})


def law_table(tokens, *cases):
    """By the moments of its own text a prompt keeps what it keeps by those that the session sums up."""
    sessions = [case.session(1) for case in cases]
    for session in sessions:
        session.prompt(tokens)
    mine, theirs = map(kept, sessions)
    assert all(np.array_equal(mine[layer], theirs[layer]) for layer in mine)
    return sessions


@pytest.mark.long
def test_a_table_stands_for_what_a_session_sums_up(stateful, tmp_path):
    file, tokens = tmp_path / "own.safetensors", np.random.default_rng(0).integers(3, 60, (1, 30))
    text = np.pad(tokens, ((0, 0), (0, 1)))  # of which the last is not read
    running = evicting(stateful("llama"), recipe("expected-attention"))
    sums, table = law_table(tokens, running, by_table(stateful("llama"), text, file))
    assert "mass.0.query.recent" in state(sums) and not any("mass" in n for n in state(table))
    table.run(tokens[:, :5])
    table.rewind(31)  # nothing was summed up that cannot be taken back
    with pytest.raises(AssertionError):
        law_table(tokens, running, by_table(stateful("llama"), text[:, ::-1] * 7 % 53 + 3, file))


def test_queries_are_turned_to_the_positions_to_come():
    """As `expected-attention` is by moments under the mean rotation; not by those before it."""
    x = named(slots(0))
    r = torch.Generator().manual_seed(1)
    mean, root = torch.randn(G * R, D, generator=r), torch.randn(G * R, D, D, generator=r)
    both, turn = {"mean": mean, "covariance": root @ root.transpose(1, 2) / D}, x["mean_rotation"]
    turned = {
        "query_mean": torch.einsum("hd,bde->bhe", mean, turn),
        "query_covariance": torch.einsum("bde,hdf,bfg->bheg", turn, both["covariance"], turn),
    }
    asked = ("keys", "values", "positions", "form")
    rest = {n: x[n] for n in asked}
    found = ExpectedAttentionStats()(**both, mean_rotation=turn, **rest)
    torch.testing.assert_close(found, ExpectedAttention()(**turned, **rest))
    still = torch.eye(D).expand(turn.shape)
    assert not torch.allclose(found, ExpectedAttentionStats()(**both, mean_rotation=still, **rest))
    assert set(MeanRotation.names) < ExpectedAttentionStats().reads


def test_a_model_without_a_table_is_refused(stateful):
    with pytest.raises(PassError, match=r"measured for another model; .*expected-attention-stats"):
        evicting(stateful("llama"), recipe("expected-attention-stats"))


@pytest.mark.long
@pytest.mark.parametrize("use", ["expected-attention", "expected-attention-stats"])
def test_onnx_equals_the_oracle(use):
    case = matrix.Case("llama", (("kv.score", use),))
    outcome = matrix.Matrix().run(case)
    assert outcome.kind == "equal", outcome.why
