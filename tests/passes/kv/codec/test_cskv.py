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
    """A method and its constants, measured of x [1,G,T,D], whose queries are large in some channels."""
    method = AXIS.build("cskv", **options)
    return method, method.measure([rows(x)])[0]


def queries_of(x):
    size = 1 + torch.arange(x.shape[1] * x.shape[3]).view(x.shape[1], 1, x.shape[3])
    return torch.randn(x.shape, generator=torch.Generator().manual_seed(1)) * size


def asked(x):
    """What an error of each channel of keys counts."""
    squares = queries_of(x).square().sum((0, 2)).flatten()
    return (squares / squares.max()).sqrt()


def rows(x):
    queries = queries_of(x)
    layer = Observed(queries, x, x, 1.0, x)
    return Rows(torch.zeros(1, x.shape[2] + 1), torch.ones(1, x.shape[2]), {0: layer})


def some(seed, tokens=256):
    """[1,2,tokens,16], in directions of very different size, the same with every seed."""
    generator = torch.Generator().manual_seed(0)
    turn = torch.linalg.qr(torch.randn(32, 32, generator=generator)).Q
    generator.manual_seed(seed)
    x = torch.randn(1, tokens, 32, generator=generator) * 0.8 ** torch.arange(32)
    return (x @ turn).unflatten(2, (2, 16)).transpose(1, 2)


@pytest.fixture(scope="module")
def keys():
    return some(0)


def flat_of(x):
    return x.transpose(1, 2).flatten(2)[0].double()


def lost(method, constants, x, role="v", weight=1.0):
    """What maps lose of x, by its channels' weights."""
    joined = x.transpose(1, 2).flatten(2)[:, None].unflatten(2, (-1, method.window))
    at = At(role, joined.shape[-1], constants=constants)
    back = method.decode(at, method.encode(at, joined))
    return float(((back.unflatten(2, (-1, method.window)) - joined) * weight).square().sum())


def loss(x, role="v", **options):
    method, constants = method_of(x, window=32, **options)
    return lost(method, constants, x, role)


def test_no_maps_to_as_many_features_lose_less(keys):
    """Nor do those that are trained from others on, as in the paper, with the same loss: they come near from above."""
    for density, features in ((0.25, 8), (0.5, 16)):
        least = float(torch.linalg.svdvals(flat_of(keys))[features:].square().sum())
        assert loss(keys, density=density) == pytest.approx(least, rel=1e-3)
    assert loss(keys, density=1.0) < 1e-6 * float(keys.square().sum())
    x, least = flat_of(keys).float(), loss(keys, density=0.25)
    generator = torch.Generator().manual_seed(2)
    down, up = (
        (0.2 * torch.randn(*s, generator=generator)).requires_grad_() for s in ((32, 8), (8, 32))
    )
    optimiser, found = torch.optim.Adam((down, up), lr=0.01), []
    for _ in range(400):
        optimiser.zero_grad()
        trained = (x @ down @ up - x).square().sum()
        trained.backward()
        optimiser.step()
        found.append(trained.item())
    assert least * 0.999 < found[-1] < 1.02 * least and found[0] > 1.5 * least


def test_keys_that_meet_large_queries_count_more(keys):
    """By the root of the queries' squares; maps of plain keys lose more of what is asked."""
    method, constants = method_of(keys, density=0.25)
    weight = asked(keys)
    least = torch.linalg.svdvals(flat_of(keys) * weight.double())[8:].square().sum()
    assert lost(method, constants, keys, "k", weight) == pytest.approx(float(least), rel=1e-3)
    plain = {f"key_{way}": constants[f"value_{way}"] for way in ("down", "up")}
    assert lost(method, plain, keys, "k", weight) > 1.1 * float(least)


def test_maps_that_learnt_with_the_rounding_lose_less_by_it():
    """Of other tokens, too: values, whose features of a token share a step. Keys, whose features have steps of their
    own, gain nothing, and lose nothing.
    """
    few = {"density": 0.5, "window": 32}
    method, trained = method_of(some(0, 1024), bits=4, **few)
    _, plain = method_of(some(0, 1024), **few)
    for role, most in (("k", 1.01), ("v", 0.85)):
        weight = 1.0 if role == "v" else asked(some(0, 1024))
        new, old = (lost(method, c, some(5), role, weight) for c in (trained, plain))
        assert new < most * old, (role, new, old)
    assert all(method.bits_of(At(role, 1024)) < 0.1 * 32 for role in "kv")


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
