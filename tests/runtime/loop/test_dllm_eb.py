"""dllm-eb: the bound of what is drawn together, and its ends."""

import dataclasses

import numpy as np
import pytest

import accel
from accel.runtime.loop.dllm_eb import DllmEb

from ...diffusion_case import BLOCK, Case, decoded, eager, guess_of, prompts


def bounded(gamma, by):
    """The longest beginning of an order whose entropies, but for the largest, sum to no more than gamma."""

    def stays(seen):
        two = np.sort(seen.logits, 1)[:, -2:]
        proxy = {
            "entropy": seen.entropy, "confidence": -seen.sure, "margin": two[:, 0] - two[:, 1],
        }[by]  # fmt: skip
        order = [i for i in np.argsort(proxy, kind="stable").tolist() if seen.free[i]]
        n = 1
        while n < len(order):
            some = seen.entropy[order[: n + 1]]
            if some.sum() - some.max() > gamma:
                break
            n += 1
        return order[:n]

    return stays


CASES = [
    Case({"gamma": gamma, "order": by}, bounded(gamma, by))
    for gamma, by in [(0.5, "entropy"), (1.5, "confidence"), (1.0, "margin")]
]


def drawn(seed):
    rng = np.random.default_rng(seed)
    guess = guess_of(rng.random(9))
    object.__setattr__(guess, "entropy", rng.exponential(0.5, 9))
    return guess


def law_bound(kind, order):
    """The sum of what stays, but for the largest, is within the bound; with one more it is not; and more stays as the
    bound grows.
    """
    for seed in range(40):
        guess, before = drawn(seed), set()
        in_order = kind(gamma=1e9, order=order).stays(guess, None)
        for gamma in (0.0, 0.1, 0.7, 2.0, 1e9):
            kept = kind(gamma=gamma, order=order).stays(guess, None)
            h = guess.entropy[kept]
            assert h.sum() - h.max() <= gamma and before <= set(kept.tolist())
            before = set(kept.tolist())
            if len(kept) < len(guess):
                h = guess.entropy[in_order[: len(kept) + 1]]
                assert h.sum() - h.max() > gamma
        assert len(before) == len(guess)


@dataclasses.dataclass(frozen=True)
class WholeSum(DllmEb):
    """Counts the largest too."""

    def stays(self, guess, place):
        order = super().stays(guess, place)
        return order[: max(1, int((guess.entropy[order].cumsum() <= self.gamma).sum()))]


@dataclasses.dataclass(frozen=True)
class OneByOne(DllmEb):
    """Bounds each entropy by itself."""

    def stays(self, guess, place):
        order = dataclasses.replace(self, gamma=1e9)
        order = DllmEb.stays(order, guess, place)
        return order[: max(1, int((guess.entropy[order] <= self.gamma).cumprod().sum()))]


@pytest.mark.parametrize("order", ["entropy", "confidence", "margin"])
def test_the_sum_but_for_the_largest_stays_below_the_bound(order):
    law_bound(DllmEb, order)


@pytest.mark.parametrize("order", ["entropy", "confidence", "margin"])
@pytest.mark.parametrize("wrong", [WholeSum, OneByOne])
def test_another_bound_is_seen(wrong, order):
    with pytest.raises(AssertionError):
        law_bound(wrong, order)


def test_tokens_that_are_certain_cost_nothing():
    guess = drawn(0)
    guess.entropy[[2, 5, 7]] = 0.0
    kept = DllmEb(gamma=0.0).stays(guess, None).tolist()
    assert kept[:3] == [2, 5, 7] and len(kept) == 4  # a fourth, for the largest is not counted


def test_its_ends():
    _, compiled = eager(True)
    _, calls, _ = decoded(compiled, "dllm-eb", prompts(), block=BLOCK, gamma=0.0)
    assert calls == [21, 21]
    once = decoded(compiled, "dllm-eb", prompts(), block=BLOCK, gamma=1e9)
    assert once == decoded(compiled, "dllm-threshold", prompts(), block=BLOCK, threshold=0.0)


@pytest.mark.parametrize("gamma", [-0.1, float("nan"), "much"])
def test_a_bound_that_is_none_is_refused(gamma):
    with pytest.raises(accel.RecipeError, match="gamma"):
        decoded(eager(False)[1], "dllm-eb", prompts(), gamma=gamma)
