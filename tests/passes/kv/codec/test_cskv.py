"""cskv: older tokens as a few features of all heads, newer ones exact."""

import numpy as np
import pytest
import torch

from accel.ir.axis import find_axes
from accel.ir.tables import Observed, Rows
from accel.passes.kv.codec import At

from ....refused import refuses
from ....select_case import Selecting
from ....session_ways import after, close

AXIS = find_axes()["kv.codec"]


def method_of(x, **options):
    """A method and its constants, measured of x [1,G,T,D]."""
    method = AXIS.build("cskv", **options)
    rows = Rows(
        torch.zeros(1, x.shape[2] + 1), torch.ones(1, x.shape[2]), {0: Observed(x, x, x, 1.0, x)}
    )
    return method, method.measure([rows])[0]


@pytest.fixture(scope="module")
def keys():
    """[1,2,256,16], in directions of very different size."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 256, 32, generator=generator) * 0.8 ** torch.arange(32)
    turn = torch.linalg.qr(torch.randn(32, 32, generator=generator)).Q
    return (x @ turn).unflatten(2, (2, 16)).transpose(1, 2)


def loss(x, role="k", **options):
    method, constants = method_of(x, window=32, **options)
    joined = x.transpose(1, 2).flatten(2)[:, None].unflatten(2, (-1, 32))
    at = At(role, 32, constants=constants)
    back = method.decode(at, method.encode(at, joined))
    return float((back.unflatten(2, (-1, 32)) - joined).square().sum())


def test_no_projection_on_as_many_directions_loses_less(keys):
    flat = keys.transpose(1, 2).flatten(2)[0].double()
    for density, features in ((0.25, 8), (0.5, 16)):
        least = float(torch.linalg.svdvals(flat)[features:].square().sum())
        assert loss(keys, density=density) == pytest.approx(least, rel=1e-3)
    assert loss(keys, density=1.0) < 1e-6 * float(keys.square().sum())


def test_four_bits_lose_a_little_more(keys):
    exact, coded = (loss(keys, density=0.5, bits=bits) for bits in (32, 4))
    assert exact < coded < exact + 0.02 * float(keys.square().sum())
    method, _ = method_of(keys, density=0.2, bits=4)
    assert all(method.bits_of(At(role, 1024)) < 0.05 * 32 for role in "kv")


@pytest.mark.long
def test_the_newest_window_is_exact_and_full_density_is_the_model(stateful):
    whole, full, half = (
        Selecting(stateful("llama"), AXIS.build("cskv", window=8, density=d) if d else None)
        for d in (0, 1.0, 0.5)
    )
    assert np.array_equal(after(half, 13)[0], after(whole, 13)[0])
    close(after(full, 30)[0], after(whole, 30)[0])
    assert np.abs(after(half, 30)[0] - after(whole, 30)[0]).max() > 1e-2


test_what_makes_no_sense_is_refused = refuses(
    "kv.codec.cskv", {"density": 0.0}, {"density": 1.5}, {"bits": 8}, {"window": 0}
)
