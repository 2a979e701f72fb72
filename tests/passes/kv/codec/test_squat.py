"""SQuat: what rounding keys loses lies across what queries ask."""

import numpy as np
import pytest
import torch

from accel.ir.axis import find_axes
from accel.passes.kv._shared.tables import observed
from accel.passes.kv.codec import At, _directions, squat
from accel.passes.kv.codec._directions import any_columns, largest, orthonormal

from ....refused import refuses
from ....select_case import Selecting
from ....session_ways import close

AXIS = find_axes()["kv.codec"]
R, D = 64, 48


def asked(seed=1, count=100):
    """Queries [1,2,count,D] that are large in three directions; and their products."""
    generator = torch.Generator().manual_seed(seed)
    turn = torch.linalg.qr(torch.randn(2, D, D, generator=generator)).Q
    size = torch.tensor([5.0, 3.0, 2.0, *[0.05] * (D - 3)])
    queries = (torch.randn(1, 2, count, D, generator=generator) * size) @ turn
    return queries, queries.mT @ queries


@pytest.fixture(scope="module")
def keys():
    """[1,2,5,R,D], channels of different size."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(1, 2, 5, R, D, generator=generator) * (1 + torch.arange(D) % 5)


def encoded(keys, products, **options):
    method = AXIS.build("squat", **{"residual": R, "channels": 16, **options})
    return method, method.encode(At("k", D, context={"queries": products}), keys)


def lost(keys, products, **options):
    """The error [1,2,5,R,D]."""
    method, parts = encoded(keys, products, **options)
    return method.decode(At("k", D), parts).unflatten(2, (-1, R)) - keys


def same(a, b):
    return all(torch.equal(a[n], b[n]) for n in a) and list(a) == list(b)


def test_without_weight_or_with_all_channels_at_once_it_is_kivi(keys):
    kivi = AXIS.build("kivi", residual=R)
    want, products = kivi.encode(At("k", D), keys), asked()[1]
    assert same(encoded(keys, products, weight=0.0)[1], want)
    assert same(encoded(keys, products, channels=D)[1], want)
    assert not same(encoded(keys, products)[1], want)  # the control
    method = AXIS.build("squat", residual=R)
    assert same(*(m.encode(At("v", D), keys) for m in (method, kivi)))


def test_the_keys_that_are_rounded_are_those_of_the_paper(keys):
    """With A = I + lambda times the squares of the queries' largest singular values and vectors, in float64."""
    queries, products = asked()
    method = AXIS.build("squat", residual=R, channels=16, directions=3, weight=0.01)
    _, size, turn = torch.linalg.svd(queries.double(), full_matrices=False)
    top = size[..., :3, None] * turn[..., :3, :]
    whole = torch.eye(D, dtype=torch.float64) + 0.01 * top.mT @ top
    target = keys.double()
    for first in (0, 16):
        i, rest = slice(first, first + 16), slice(first + 16, D)
        error = method._read(target[..., i].float()) - target[..., i]
        step = torch.linalg.solve(whole[..., rest, rest], whole[..., rest, i])
        target[..., rest] -= error @ step.mT[:, :, None]
    found = method._shifted(keys, products, None)
    assert (found - target).abs().max() < 0.02 and (found - keys).abs().max() > 1


def test_error_before_queries_falls_with_weight(keys):
    """Against the error of the keys themselves; by the products of other queries it does not fall."""
    queries, products = asked()

    def along(**options):
        error = lost(keys, options.pop("products", products), bits=4, directions=3, **options)
        return float((error @ queries[:, :, None].mT).norm()), float(error.norm())

    each = [along(weight=w) for w in (0.0, 1e-3, 1e-2, 1e-1)]
    asking, plain = zip(*each, strict=True)
    assert all(b < 0.97 * a for a, b in zip(asking, asking[1:], strict=False))
    assert plain[0] < plain[-1] < 2 * plain[0]
    assert along(weight=1e-1, products=asked(seed=9)[1])[0] > asking[0]
    for weight in (1e-3, 1e-1):
        mean = [p**2 + weight * a**2 for a, p in (along(weight=weight), each[0])]
        assert mean[0] < mean[1]  # the loss that it is least in


SPECTRA = {
    "flat": torch.ones(D),
    "falling": torch.linspace(3, 0.5, D),
    "steep": 5 * 0.7 ** torch.arange(D),
    "six alike": torch.tensor([5.0] * 6 + [1.0] * (D - 6)),
    "seven close": torch.tensor([5, 4.9, 4.8, 4.7, 4.6, 4.5, 4.4, *[1.0] * (D - 7)]),
    "one massive": torch.tensor([60.0, 2.0, 1.9, 1.8, 1.7, 1.6, 1.5, *[0.5] * (D - 7)]),
    "two massive": torch.tensor([300.0, 40.0, 3, 2.9, 2.8, 2.7, 2.6, *[1.0] * (D - 7)]),
    "a thousand times": torch.tensor([1000.0, 2.9, 2.8, 2.7, 2.6, 2.5, 2.4, *[1.0] * (D - 7)]),
    "of one query": torch.tensor([5.0] + [0.0] * (D - 1)),
    "slow": 5 * 0.99 ** torch.arange(D),
    "inverse": 1 / (1 + torch.arange(D)),
}


def exact(products, count):
    """The same as `_subspace`, by eigenvectors in float64."""
    size, turn = torch.linalg.eigh(products.double())
    return (size[..., -count:].clamp(min=0).sqrt()[..., None, :] * turn[..., -count:]).float()


def spread(name, count):
    """Products [1,2,D,D] of so many queries of a spectrum."""
    r = torch.Generator().manual_seed(1)
    turn = torch.linalg.qr(torch.randn(2, D, D, generator=r)).Q
    queries = (torch.randn(1, 2, count, D, generator=r) * SPECTRA[name]) @ turn
    return queries.mT @ queries


def law_converged(name):
    """Directions hold as much of the queries' squares as the largest eigenvalues do, a thousandth apart."""
    for count in (300, 20):
        products = spread(name, count)
        columns, whole = largest(products, 5).double(), products.double()
        held = (columns * (whole @ columns)).sum((-2, -1))
        most = torch.linalg.eigvalsh(whole)[..., -5:].sum(-1)
        assert ((1 - held / most) < 1e-3).all(), (name, count, held / most)


def law_directions(keys, name, monkeypatch):
    """The loss is that by exact eigenvectors, a hundredth apart, whatever the queries' spectrum."""
    products = spread(name, 300)
    top = exact(products, 5)[:, :, None]

    def loss():
        error = lost(keys, products, weight=0.01)
        return float(error.square().sum() + 0.01 * (error @ top).square().sum())

    found = loss()
    monkeypatch.setattr(squat, "_subspace", exact)
    want = loss()
    monkeypatch.undo()
    assert found < 1.01 * want, (found, want)


@pytest.mark.parametrize("name", SPECTRA)
def test_directions_are_those_of_the_largest_eigenvalues(keys, name, monkeypatch):
    law_directions(keys, name, monkeypatch)


@pytest.mark.parametrize("name", SPECTRA)
def test_directions_converge(name):
    law_converged(name)


def test_directions_after_few_squarings_are_caught(monkeypatch):
    monkeypatch.setattr(_directions, "_SQUARINGS", 6)
    with pytest.raises(AssertionError):
        for name in SPECTRA:
            law_converged(name)


def test_directions_that_have_not_converged_are_caught(keys, monkeypatch):
    def few(products, count):
        columns = any_columns(products, count)
        for step in range(4):
            columns = orthonormal(products @ (products @ columns), again=step == 3)
        return columns

    with pytest.raises(AssertionError):
        for name in SPECTRA:
            monkeypatch.setattr(squat, "largest", few)
            law_directions(keys, name, monkeypatch)


def small(name, **options):
    return AXIS.build(name, **{"bits": 4, "group": 4, "residual": 8, **options})


@pytest.mark.long
def test_a_session_sums_the_products_of_its_queries(stateful):
    """Of each row, padding left out, whatever the calls."""
    program = stateful("llama")
    tokens = np.random.default_rng(0).integers(3, program.facts.vocab_size, (2, 30))
    case = Selecting(program.copy(), small("squat", directions=1, channels=4))
    ids = torch.from_numpy(np.concatenate([tokens, tokens[:, :1]], 1))
    told = next(observed(program, [(ids[1:, :13], torch.ones(1, 12))])).layers[0].queries
    want = sum(q.mT @ q for q in told[0].unflatten(0, (-1, 2)).transpose(0, 1))
    with case.session(2) as session:
        session.run(tokens[:, :20], [20, 8])
        session.run(np.stack([tokens[0, 20:24], tokens[1, 8:12]]))
        found = session._core.backend._state["mass.0.query.recent"]
        close(found[1], want)
        assert not np.allclose(found[0], want, atol=1e-1)


def drive(program, method=None):
    case = Selecting(program, method)
    tokens = case.tokens(1, 42)
    with case.session() as session:
        return np.concatenate([session.run(x) for x in (tokens[:, :40], tokens[:, 40:])], 1)


@pytest.mark.long
def test_a_session_without_weight_is_that_of_kivi(stateful):
    kivi, none, some = (
        drive(stateful("llama"), m)
        for m in (
            small("kivi"),
            small("squat", directions=1, channels=4, weight=0.0),
            small("squat", directions=1, channels=4, weight=0.1),
        )
    )
    assert np.array_equal(kivi, none) and np.abs(some - kivi).max() > 1e-3


test_what_makes_no_sense_is_refused = refuses(
    "kv.codec.squat", {"weight": -1.0}, {"directions": 0}, {"channels": 0}, {"bits": 3}
)
