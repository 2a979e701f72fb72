"""dllm-entropy: its grid of times, one block for the answer, and random order."""

import numpy as np
import pytest

import accel
from accel.runtime.loop.dllm_entropy import DllmEntropy

from ...diffusion_case import NEW, decoded, eager, prompts, with_loop


def test_shares_are_of_what_is_left():
    loop = DllmEntropy(end=0.0)
    left, counts = 64, []
    for step in range(8):
        n = int(left * loop.share(step, 8) + 1e-9)
        counts.append(n)
        left -= n
    assert left == 0 and counts == [8] * 8


def test_the_answer_is_one_block_in_as_many_calls_as_steps():
    _, compiled = eager(True)
    for steps in (1, 3, 7):
        assert decoded(compiled, "dllm-entropy", prompts(), steps=steps)[1] == [steps, steps]
    _, calls, _ = decoded(compiled, "dllm-entropy", prompts())
    assert all(NEW // 2 <= n <= NEW for n in calls)


def test_steps_that_fill_nothing_take_no_call():
    _, compiled = eager(True)
    _, calls, _ = decoded(compiled, "dllm-entropy", prompts(), steps=500)
    assert max(calls) <= NEW


def test_the_order_is_seen():
    _, compiled = eager(True)
    found = {
        str(decoded(compiled, "dllm-entropy", prompts(), steps=6, order=order)[0])
        for order in ("entropy", "margin", "confidence")
    }
    assert len(found) > 1


def test_origin_fills_a_binomial_number():
    """Of 64 masks at a share of a half, and never none."""
    from accel.runtime.loop._canvas import Place

    from ...diffusion_case import guess_of

    loop, guess = DllmEntropy(order="origin", steps=2, end=0.0), guess_of(np.full(64, 0.5))
    rng, found = np.random.default_rng(0), []
    for _ in range(400):
        place = Place(0, 64, np.ones(64, bool), 0, 0, 64, loop.begin(None), rng)
        found.append(len(loop.stays(guess, place)))
    assert abs(np.mean(found) - 32) < 1 and abs(np.var(found) - 16) < 4 and min(found) > 0


def test_origin_goes_by_the_seed():
    with with_loop(eager(True)[1], "dllm-entropy", steps=6, order="origin") as made:
        first, again, other = (
            made.generate(prompts()[0], max_new_tokens=NEW, eos=[], seed=seed).tokens
            for seed in (1, 1, 2)
        )
    assert first == again != other


@pytest.mark.parametrize(
    "wrong", [{"end": 1.5}, {"steps": -1}, {"block": 0}, {"order": "hope"}], ids=str
)
def test_what_is_no_schedule_is_refused(wrong):
    with pytest.raises(accel.RecipeError, match=next(iter(wrong))):
        decoded(eager(False)[1], "dllm-entropy", prompts(), **wrong)
