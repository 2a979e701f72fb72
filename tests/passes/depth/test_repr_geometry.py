"""repr-geometry: RankMe and alpha-ReQ against NumPy, and what they must not depend on."""

import numpy as np
import pytest
import torch

from accel.passes.depth import repr_geometry
from accel.passes.depth._joint import layers
from accel.passes.depth.repr_geometry import alpha_req, rank_me

from ...depth_case import LAYERS, module_of, program_of

RNG = np.random.default_rng(7)
TEXT = torch.from_numpy(RNG.integers(3, 90, (40, 12)))


def plain_rank(z):
    s = np.sqrt(np.clip(np.linalg.eigvalsh(z @ z.T if len(z) < z.shape[1] else z.T @ z), 0, None))
    p = s / s.sum() + 1e-7
    return np.exp(-(p * np.log(p)).sum())


def plain_exponent(z):
    values = np.sort(np.linalg.eigvalsh(np.cov(z.T)))[::-1]
    values = values[values > values.max() * 1e-12]
    return -np.polyfit(np.log(np.arange(1, len(values) + 1)), np.log(values), 1)[0]


def turned(z):
    q, _ = np.linalg.qr(RNG.standard_normal((z.shape[1], z.shape[1])))
    return z @ q


@pytest.mark.parametrize("shape", [(9, 30), (30, 9), (12, 12)])
def test_rank_and_exponent(shape):
    z = RNG.standard_normal(shape) * np.arange(1, shape[1] + 1) ** -0.7
    rank, exponent = rank_me(torch.from_numpy(z)), alpha_req(torch.from_numpy(z))
    assert rank == pytest.approx(plain_rank(z), rel=1e-4) and 1 < rank < min(shape)
    assert exponent == pytest.approx(plain_exponent(z), rel=1e-6)
    for other in (turned(z), 17.0 * z, -0.01 * turned(z)):
        assert rank_me(torch.from_numpy(other)) == pytest.approx(rank, rel=1e-4)
        assert alpha_req(torch.from_numpy(other)) == pytest.approx(exponent, rel=1e-4)
    assert rank_me(torch.from_numpy(z * np.arange(1, shape[1] + 1))) != pytest.approx(
        rank, rel=1e-2
    )


@pytest.mark.parametrize("shape", [(9, 30), (30, 9)])
def test_the_rank_is_at_most_the_smaller_size_and_one_at_least(shape):
    flat, _ = np.linalg.qr(RNG.standard_normal((max(shape), min(shape))))
    flat = flat if shape[0] > shape[1] else flat.T
    assert rank_me(torch.from_numpy(flat)) == pytest.approx(min(shape), rel=1e-4)
    assert rank_me(torch.outer(torch.ones(5), torch.arange(1.0, 8)).double()) == pytest.approx(1, rel=1e-4)  # fmt: skip
    for nothing in (torch.zeros(5, 8).double(), torch.ones(1, 8).double()):
        assert rank_me(nothing) == pytest.approx(1, abs=1e-4) and alpha_req(nothing) == 0


def test_a_spectrum_of_a_power_has_that_exponent():
    base, _ = np.linalg.qr(np.hstack([np.ones((20, 1)), RNG.standard_normal((20, 12))]))
    z = base[:, 1:] * np.arange(1, 13) ** -0.6  # the columns have no mean
    assert alpha_req(torch.from_numpy(z)) == pytest.approx(1.2, rel=1e-6)


def test_scores_are_of_the_last_tokens_of_transformers_hidden_states():
    program, method = program_of(LAYERS, TEXT), repr_geometry.ReprGeometry()
    found, error = method.scores(program, layers(program), TEXT)
    with torch.no_grad():
        states = module_of(LAYERS)(TEXT, output_hidden_states=True).hidden_states
    ranks = [plain_rank(x[:, -1].double().numpy()) for x in states[:LAYERS]]  # the last is normed
    np.testing.assert_allclose(found[: LAYERS - 1], np.abs(np.diff(ranks)), rtol=1e-3, atol=1e-4)
    other = [plain_rank(x[:, 0].double().numpy()) for x in states[:LAYERS]]
    assert np.abs(np.abs(np.diff(other)) - np.abs(np.diff(ranks))).max() > 0.1, "the control"
    (note,) = program.facts.notes[-1:]
    assert f"RankMe before each layer and behind the last {ranks[0]:.3g}, {ranks[1]:.3g}, " in note
    assert "; alpha-ReQ " in note and error.shape == (LAYERS,)


def test_layers_that_change_the_rank_least_go_first():
    program = program_of(6, TEXT)
    method, calls = repr_geometry.ReprGeometry(), None
    calls = layers(program)
    scores, _ = method.scores(program, calls, TEXT)
    found = method.goes(program, calls, 2, TEXT)
    assert list(found) == [i for i in scores.argsort().tolist() if i not in (0, 5)][:2]


def test_at_once_does_not_matter(monkeypatch):
    program = program_of(LAYERS, TEXT)
    calls = layers(program)
    found = repr_geometry.last_states(program, calls, TEXT)
    monkeypatch.setattr(repr_geometry, "AT_ONCE", 7)
    for a, b in zip(found, repr_geometry.last_states(program, calls, TEXT), strict=True):
        assert a.shape == (40, 48) and torch.allclose(a, b, atol=1e-5)
