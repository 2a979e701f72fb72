"""Bregman top-k decoding (arXiv:2505.19371): as many of the likeliest tokens as are worth a price each, with the
probabilities that are nearest to the model's in a Bregman divergence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

from accel.ir.axis import option
from accel.ir.errors import InputError
from accel.runtime.inputs.ints import Ints
from accel.runtime.sample import Base, Distribution

Floats = npt.NDArray[np.float64]
_STEPS = 200  # of Newton's method, which takes about six
_NEAR = 1e-13  # of a sum of probabilities to 1
_TINY = 1e-300  # what leaves less of a divergence is worth no price


@dataclass(frozen=True)
class BregmanTopk(Base):
    """Minimizes D(x, p) + `price` · (tokens that x has) over distributions x, with φ(x) = x^`alpha` / (alpha(alpha-1)),
    or x ln x where alpha is 1. alpha 1 keeps proportions, as top-k does; above, the less likely tokens gain.
    `dual`: D(p, x), which needs alpha above 1. price 0 keeps all tokens as they are.
    """

    alpha: float = option(1.5, least=1, most=16)
    price: float = option(0.01, least=0, most=1)
    dual: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dual and self.alpha == 1:
            raise InputError(
                f"{self.full_name}: dual = True needs alpha above 1, where a token may be left out; give a larger alpha"
            )

    def reshape(self, law: Distribution, seen: Ints) -> Distribution:
        if self.price == 0:
            return law
        weights, reach = law.weights, 1e-2
        top = weights.max()
        while True:
            some = np.flatnonzero(weights >= reach * top)
            whole = some.size == weights.size or reach == 0
            order = some[np.argsort(-weights[some], kind="stable")]
            p = weights[order].astype(np.float64) / law.total
            count = self._count(p[p**self.alpha > _TINY])
            if whole or count < p.size:  # the next one was looked at, and is not worth it
                break
            reach = reach * 1e-2 if reach > 1e-30 else 0.0
        x, order = self.nearest(p[:count]), order[:count]
        rising = np.argsort(order)
        return Distribution(law.tokens[order[rising]], x[rising])

    def _count(self, p: Floats) -> int:
        """How many of the likeliest tokens, p falling, are worth their price: the cost is convex in their number."""
        if self.alpha == 1:
            before = p.cumsum()[:-1]
            stays = np.flatnonzero(p[1:] <= np.expm1(self.price) * before)
            return int(stays[0]) + 1 if stays.size else p.size
        within = cache(lambda count: self.within(p[:count]))
        beyond = self.beyond(p)

        def gains(count: int) -> bool:
            """Whether one token more than so many is worth its price."""
            return bool(within(count) + beyond[count] > within(count + 1) + self.price)

        low, high = 0, 1  # `low` is too few; `high` may be enough
        while high < p.size and gains(high):
            low, high = high, min(2 * high, p.size)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if gains(middle) else (low, middle)
        return high

    def within(self, p: Floats) -> float:
        """The divergence of p [k] from its nearest distribution over all of them."""
        x = self.nearest(p)
        a, b = (p, x) if self.dual else (x, p)
        if self.alpha == 1:
            return float((a * np.log(a / b) - a + b).sum())
        power, scale = self.alpha - 1, self.alpha * (self.alpha - 1)
        return float(((a**self.alpha - b**self.alpha) / scale - b**power * (a - b) / power).sum())

    def beyond(self, p: Floats) -> Floats:
        """The divergence of each of p [n] from 0."""
        if self.alpha == 1:
            return p
        scale = self.alpha * (self.alpha - 1) if self.dual else self.alpha
        found: Floats = p**self.alpha / scale
        return found

    def nearest(self, p: Floats) -> Floats:
        """The distribution over all of p [k], which sums to at most 1, that is nearest to it."""
        missing = 1 - p.sum()
        if self.alpha == 1 or missing <= _NEAR:
            x = p
        elif self.alpha == 2:  # both ways are one
            x = p + missing / p.size
        else:
            x = self._dual(p) if self.dual else self._primal(p)
        found: Floats = x / x.sum()
        return found

    def _primal(self, p: Floats) -> Floats:
        """x = (p^(alpha-1) + v)^(1/(alpha-1)), with v so that it sums to 1."""
        power = self.alpha - 1
        q = p**power

        def norm(v: float) -> tuple[float, float]:
            """Of q + v, which is almost straight in v, and its slope."""
            x = (q + v) ** (1 / power)
            total = x.sum()
            found = total**power
            return found, float(found / total * (x / (q + v)).sum())

        v = _solved(norm, 1.0)
        x: Floats = (q + v) ** (1 / power)
        return x

    def _dual(self, p: Floats) -> Floats:
        """x^(alpha-2) (x - p) = v, with v so that x sums to 1."""
        power = self.alpha - 1

        def at(v: float) -> tuple[Floats, Floats]:
            """x >= p and its slope in v, by Newton's method, from the side on which the left curves away."""
            x: Floats = p + v ** (1 / power)
            for _ in range(_STEPS):
                slope: Floats = x ** (power - 2) * (power * x - (power - 1) * p)
                step = (x ** (power - 1) * (x - p) - v) / slope
                x = x - step
                if (np.abs(step) <= _NEAR * x).all():
                    break
            return x, 1 / slope

        def total(v: float) -> tuple[float, float]:
            x, slope = at(v)
            return float(x.sum()), float(slope.sum())

        x, _ = at(_solved(total, 1.0))
        return x


def _solved(value: Callable[[float], tuple[float, float]], high: float) -> float:
    """Where a rising function, given with its slope, is 1, from 0 to `high`: Newton's method within a bracket."""
    low, v = 0.0, 0.0
    for _ in range(_STEPS):
        found, slope = value(v)
        if abs(found - 1) < _NEAR or high - low < 1e-300:
            break
        low, high = (v, high) if found < 1 else (low, v)
        v += (1 - found) / slope
        if not low < v < high:
            v = (low + high) / 2
    return v
