"""ccd: what agrees with the call before stays beside the surest token."""

from dataclasses import replace

import numpy as np

from accel.runtime.loop._canvas import Place
from accel.runtime.loop.ccd import Ccd

from ...diffusion_case import BLOCK, decoded, eager, guess_of, prompts


def said(loop, memory, step, entropy, tokens, slots=None):
    n = len(entropy)
    guess = replace(
        guess_of(np.full(n, 0.5)), entropy=np.array(entropy), tokens=np.array(tokens),
        slots=np.arange(n) if slots is None else np.array(slots),
    )  # fmt: skip
    place = Place(step, 20, np.ones(20, bool), 0, 0, 20, memory, np.random.default_rng(0))
    return guess.slots[loop.stays(guess, place)].tolist()


def test_slots_that_were_next_and_have_not_changed_stay_together():
    loop, memory = Ccd(warm=1, expand=4.0), {}
    assert said(loop, memory, 0, [1, 2, 3, 4, 5], [7, 7, 7, 7, 7]) == [0]
    left = [1, 2, 3, 4]
    assert said(loop, memory, 1, [2, 3, 4, 5], [7, 7, 7, 7], left) == [1, 2]
    assert said(loop, memory, 2, [1, 2], [7, 7], [3, 4]) == [3, 4]


def test_what_changed_or_was_not_next_waits():
    for tokens, entropy, want in (
        ([7, 9, 7, 7], [2, 3, 4, 5], [1]),  # the second slot's token changed
        ([7, 7, 7, 7], [5, 4, 3, 2], [4]),  # the surest was not among the next
    ):
        loop, memory = Ccd(warm=1, expand=4.0), {}
        said(loop, memory, 0, [1, 2, 3, 4, 5], [7] * 5)
        assert said(loop, memory, 1, entropy, tokens, [1, 2, 3, 4]) == want


def test_a_fixed_budget_keeps_as_many_as_before():
    loop, memory = Ccd(warm=1, adaptive=False), {}
    said(loop, memory, 0, [1, 2, 3, 4, 5], [7] * 5)
    assert said(loop, memory, 1, [2, 3, 4, 5], [7] * 4, [1, 2, 3, 4]) == [1]


def test_fewer_calls_than_one_token_each_and_no_more():
    _, compiled = eager(False)
    fixed = decoded(compiled, "ccd", prompts(), block=BLOCK, warm=1, adaptive=False)[1]
    assert fixed == [21, 21]
    assert max(decoded(compiled, "ccd", prompts(), block=21, warm=1)[1]) < 21
