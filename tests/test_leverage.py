"""Leverage by unrolled iterations, beside a solve in double precision."""

import pytest
import torch

from accel.passes.kv.score._leverage import finite, leverage


def solved(rows, ridge):
    rows = rows.double()
    matrix = rows.mT @ rows + ridge * torch.eye(rows.shape[-1]).double()
    return (rows * torch.linalg.solve(matrix, rows.mT).mT).sum(-1)


def rows(count, width, scale=1.0, rank=None, seed=0):
    r = torch.Generator().manual_seed(seed)
    rank = rank or width
    spread = torch.logspace(0, -1.5, rank)
    return (
        scale
        * torch.randn(2, count, rank, generator=r)
        * spread
        @ torch.randn(rank, width, generator=r)
    )


@pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0])
@pytest.mark.parametrize(
    "count, width, rank", [(300, 48, 48), (20, 48, 16), (300, 48, 16), (1, 8, 8)]
)
@pytest.mark.parametrize("ridge", [0.01, 1.0])
def test_it_is_the_solve(count, width, rank, scale, ridge):
    x = rows(count, width, scale, rank)
    found = leverage(x, ridge)
    torch.testing.assert_close(found.double(), solved(x, ridge), atol=5e-3, rtol=5e-3)
    assert float(found.sum(-1).max()) <= min(rank, count) * 1.005


def test_fewer_iterations_would_not_do(monkeypatch):
    x = rows(20, 48, 30.0, 16)
    monkeypatch.setattr("accel.passes.kv.score._leverage._ROOT", 6)
    assert float((leverage(x, 0.01) - solved(x, 0.01)).abs().max()) > 0.05


def test_it_does_not_depend_on_the_basis_and_duplicates_share():
    r = torch.Generator().manual_seed(3)
    x, turn = torch.randn(2, 60, 8, generator=r), torch.randn(8, 8, generator=r)
    torch.testing.assert_close(leverage(x @ turn, 1e-6), leverage(x, 1e-6), atol=5e-3, rtol=1e-2)
    assert not torch.allclose(leverage(x @ turn, 100.0), leverage(x, 100.0), atol=2e-2)
    alone, twice = leverage(x, 1e-6), leverage(torch.cat((x, x), 1), 1e-6)
    torch.testing.assert_close(twice[:, :60], alone / 2, atol=1e-3, rtol=1e-3)
    assert torch.equal(leverage(torch.zeros(1, 4, 3), 1.0), torch.zeros(1, 4))


def test_a_slot_of_no_number_is_not_real():
    x = torch.zeros(1, 1, 3, 2)
    x[0, 0, 1, 0] = float("nan")
    assert finite(torch.ones(1, 1, 3).bool(), x).tolist() == [[[True, False, True]]]
