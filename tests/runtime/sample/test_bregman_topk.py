"""Bregman top-k: the best of all supports, by a solver that knows no closed form; its limits; convexity in k."""

import itertools

import numpy as np
import pytest
import torch

from accel.ir.errors import InputError, RecipeError
from accel.runtime.sample import Distribution, named
from accel.runtime.sample.bregman_topk import BregmanTopk

OPTIONS = [
    {"alpha": 1.0, "price": 0.3},
    {"alpha": 1.0},
    {"alpha": 1.5},
    {"alpha": 1.2, "price": 1e-3},
    {"alpha": 3.0, "price": 1e-4},
    {"alpha": 2.0, "dual": True},
    {"alpha": 1.5, "dual": True},
    {"alpha": 3.0, "price": 1e-3, "dual": True},
]
NONE = np.zeros(0, np.int64)


def phi(x, alpha):
    if alpha == 1:
        return np.where(x > 0, x * np.log(np.maximum(x, 1e-300)), 0.0)
    return x**alpha / (alpha * (alpha - 1))


def slope(x, alpha):
    return np.log(x) + 1 if alpha == 1 else x ** (alpha - 1) / (alpha - 1)


def divergence(x, p, o):
    """D(x, p), or D(p, x), by its definition."""
    a, b = (p, x) if o.dual else (x, p)
    return float((phi(a, o.alpha) - phi(b, o.alpha) - slope(b, o.alpha) * (a - b)).sum())


def root(f, low, high):
    """Where a rising function of arrays is 0."""
    for _ in range(60):
        middle = (low + high) / 2
        above = f(middle) > 0
        low, high = np.where(above, low, middle), np.where(above, middle, high)
    return (low + high) / 2


def nearest(p, o):
    """[n,n]: for each count, the distribution over so many of p [n] whose divergence has one slope in all of them, by a
    search for it.
    """
    there = np.tri(p.size, dtype=bool)

    def at(v):
        if o.alpha == 1:
            x = p * np.exp(v)
        elif not o.dual:
            x = (p ** (o.alpha - 1) + v) ** (1 / (o.alpha - 1))
        else:
            left = lambda x: x ** (o.alpha - 2) * (x - p) - v  # noqa: E731
            x = root(left, np.broadcast_to(p, there.shape), np.full(there.shape, 2.0))
        return np.where(there, x, 0)

    most = np.full((p.size, 1), 40.0 if o.alpha == 1 else 1.0)
    return at(root(lambda v: at(v).sum(-1, keepdims=True) - 1, np.zeros_like(most), most))


def probabilities(p, o):
    """The least cost of all counts, none left out, over the likeliest tokens."""
    order = np.argsort(-p, kind="stable")[: min(np.count_nonzero(p), 30 if o.dual else 150)]
    best, found = np.inf, None
    for i, x in enumerate(nearest(p[order], o)):
        some = order[: i + 1]
        rest = np.delete(p, some)
        left = rest if o.alpha == 1 else phi(rest, o.alpha) if o.dual else rest**o.alpha / o.alpha
        cost = divergence(x[: i + 1], p[some], o) + left.sum() + o.price * some.size
        if cost < best - 1e-13:
            best, found = cost, np.zeros_like(p)
            found[some] = x[: i + 1]
    return found / found.sum()


def over(o, p):
    """[V]."""
    law = Distribution(np.arange(p.size), p)
    return o.reshape(law, NONE).dense(p.size)


@pytest.mark.parametrize(
    "dual, alpha, want",
    [
        (False, 1.0, (0.5882, 0.2941, 0.1176)),
        (False, 2.0, (0.55, 0.30, 0.15)),
        (False, 1.5, (0.5688, 0.2993, 0.1320)),
        (True, 1.5, (0.5679, 0.2993, 0.1328)),
        (False, 3.0, (0.5231, 0.2935, 0.1834)),
    ],
)
def test_known_values(dual, alpha, want):
    got = BregmanTopk(alpha=alpha, dual=dual).nearest(np.array([0.5, 0.25, 0.1]))
    np.testing.assert_allclose(got, want, atol=6e-5)


def solved(p, o):
    """The least divergence from p [k] over the simplex, and where it is: gradients of a softmax, no closed form."""
    p = torch.from_numpy(p)
    x = (p / p.sum()).log().requires_grad_()
    steps = torch.optim.LBFGS(
        [x], max_iter=100, tolerance_grad=1e-12, line_search_fn="strong_wolfe"
    )

    def of(x):
        a, b = (p, x) if o.dual else (x, p)
        if o.alpha == 1:
            return (a * (a / b).log() - a + b).sum()
        power, scale = o.alpha - 1, o.alpha * (o.alpha - 1)
        return ((a**o.alpha - b**o.alpha) / scale - b**power / power * (a - b)).sum()

    def call():
        steps.zero_grad()
        cost = of(x.softmax(0))
        cost.backward()
        return cost

    steps.step(call)
    best = x.detach().softmax(0)
    return float(of(best)), best.numpy()


def brute(p, o):
    """The least cost of all supports, whatever tokens they are."""
    best, found = np.inf, None
    for count in range(1, p.size + 1):
        for support in itertools.combinations(range(p.size), count):
            some = list(support)
            rest = np.delete(p, some)
            left = (
                rest if o.alpha == 1 else phi(rest, o.alpha) if o.dual else rest**o.alpha / o.alpha
            )
            cost, x = solved(p[some], o)
            if (cost := cost + left.sum() + o.price * count) < best:
                best, found = cost, np.zeros_like(p)
                found[some] = x
    return found


BRUTE = [(1.0, False, 0.15), (1.5, False, 0.01), (3.0, False, 2e-3), (1.5, True, 0.02), (3.0, True, 2e-3)]  # fmt: skip


@pytest.mark.parametrize("alpha, dual, price", BRUTE)
def test_no_support_is_better(alpha, dual, price):
    """Whatever tokens they are, not only the likeliest."""
    o = BregmanTopk(alpha=alpha, dual=dual, price=price)
    p = np.random.default_rng(3).dirichlet(np.full(5, 0.6))
    want = brute(p, o)
    got = over(o, p)
    assert 1 < np.count_nonzero(got) < p.size, "or the price says nothing"
    np.testing.assert_allclose(got, want, atol=2e-4)
    wrong = over(BregmanTopk(alpha=alpha, dual=dual, price=1.0), p)
    assert np.abs(wrong - want).max() > 0.01, "the control: another price"


@pytest.mark.parametrize("dual", [False, True])
@pytest.mark.parametrize("alpha", [1.0, 1.1, 1.5, 2.0, 3.0, 10.0])
def test_the_cost_is_convex_in_the_count_and_probabilities_rise_in_order(alpha, dual):
    if dual and alpha == 1:
        return
    o = BregmanTopk(alpha=alpha, dual=dual)
    for seed in range(4):
        p = np.sort(np.random.default_rng(seed).dirichlet(np.full(30, 0.7)))[::-1]
        costs = np.array([o.within(p[:k]) + o.beyond(p[k:]).sum() for k in range(1, p.size + 1)])
        assert (np.diff(costs, 2) > -1e-9).all() and abs(costs[-1]) < 1e-9
        for k in (1, 5, 29):
            x = o.nearest(p[:k])
            assert abs(x.sum() - 1) < 1e-12 and (x >= p[:k] - 1e-12).all()
            assert (np.diff(x) <= 1e-12).all()


def test_limits():
    """alpha 1 is top-k of the count; a price of none keeps all; a higher price keeps no more."""
    p = np.random.default_rng(0).dirichlet(np.full(200, 0.3))
    one = over(BregmanTopk(alpha=1.0, price=0.02), p)
    count = np.count_nonzero(one)
    top = np.where(p >= np.sort(p)[-count], p, 0)
    np.testing.assert_allclose(one, top / top.sum(), rtol=1e-12)
    assert np.array_equal(over(BregmanTopk(price=0.0), p), p / p.sum())
    counts = [np.count_nonzero(over(BregmanTopk(price=c), p)) for c in (1e-6, 1e-3, 1e-2, 0.1, 1)]
    assert counts == sorted(counts, reverse=True) and counts[0] > 50 and counts[-1] == 1


@pytest.mark.parametrize("size", [1, 2, 7, 5000])
def test_flat_and_certain_distributions(size):
    """Of equals, whole blocks come within reach at once, and all have one probability."""
    flat = over(BregmanTopk(price=1e-9), np.full(size, 1 / size))
    some = flat[flat > 0]
    assert np.ptp(some) < 1e-15 and some.size == size
    certain = np.zeros(size)
    certain[size // 2] = 1
    assert over(BregmanTopk(), certain)[size // 2] == 1


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("dual", [False, True])
@pytest.mark.parametrize("alpha", [1.0001, 1.3, 2.0001, 16.0])
def test_extreme_options_and_distributions_give_numbers(alpha, dual):
    """Tokens of e^-600, and prices of almost nothing."""
    for seed, spread in enumerate((0, 1, 12, 100)):
        z = np.random.default_rng(seed).standard_normal(300) * spread
        p = np.exp(z - z.max())
        p /= p.sum()
        for price in (1e-9, 0.3):
            x = over(BregmanTopk(alpha=alpha, dual=dual, price=price), p)
            assert abs(x.sum() - 1) < 1e-9 and (x[x > 0] >= p[x > 0] - 1e-9).all()


def test_kl_has_no_dual():
    with pytest.raises(InputError, match="dual = True needs alpha above 1"):
        named({"use": "bregman-topk", "alpha": 1.0, "dual": True})
    with pytest.raises((InputError, RecipeError), match="alpha is 0.5; give 1 to 16"):
        BregmanTopk(alpha=0.5)
