"""dllm-entropy: its grid of times, one block for the answer, and random order."""

from dataclasses import replace

import numpy as np
import pytest

import accel
from accel.runtime.decode.row import Row
from accel.runtime.loop._canvas import Guess, Place
from accel.runtime.loop.dllm_entropy import DllmEntropy
from accel.runtime.sample.standard import Standard

from ...diffusion_case import LONGEST, NEW, Case, decoded, eager, guess_of, law, prompts, with_loop


def scheduled(by, steps=None, end=1e-3):
    """As many of the masks as the time from one step to the next says; of those steps that fill some."""

    def stays(seen):
        times = np.linspace(1, end, (steps or len(seen.slots)) + 1)
        left, n = int(seen.left.sum()), 0
        i = seen.memory.get("step", 0) if seen.step else 0
        while not n:  # the next step of the published loop that fills some
            n = left if i + 1 >= len(times) - 1 else int(left * (1 - times[i + 1] / times[i]))
            i += 1
        seen.memory["step"] = i
        two = np.sort(law(seen.logits), 1)[:, -2:]
        score = {
            "entropy": seen.entropy, "margin": two[:, 0] - two[:, 1], "confidence": -seen.sure,
        }[by]  # fmt: skip
        score = np.where(seen.free, score, np.inf)
        return np.argsort(score, kind="stable")[: min(n, int(seen.free.sum()))]

    return stays


CASES = [
    Case({"order": "entropy"}, scheduled("entropy")),
    Case({"order": "margin", "steps": 4}, scheduled("margin", 4)),
    Case({"order": "confidence", "steps": 11, "end": 0.1}, scheduled("confidence", 11, 0.1)),
]


def law_shares(kind):
    """All masks are filled in so many steps, as many by each where time goes to 0."""
    loop = kind(end=0.0)
    left, counts = 64, []
    for step in range(8):
        n = int(left * loop.share(step, 8) + 1e-9)
        counts.append(n)
        left -= n
    assert left == 0 and counts == [8] * 8


class OfAll(DllmEntropy):
    """Takes a step's share of all masks for that of what is left."""

    def share(self, step, steps):
        return 1 / steps


def test_shares_are_of_what_is_left():
    law_shares(DllmEntropy)
    with pytest.raises(AssertionError):
        law_shares(OfAll)


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


def kept(loop, guess, row, step=0):
    """Which of a guess's slots stay, of a block that has as many masks."""
    rng, n = np.random.default_rng(0) if row is None else row.rng, len(guess)
    return loop.stays(guess, Place(step, n, np.ones(n, bool), 0, 0, n, loop.begin(row), rng))


def test_origin_fills_a_binomial_number():
    """Of 64 masks at a share of a half, and never none."""
    loop, guess, row = (
        DllmEntropy(order="origin", steps=2, end=0.0),
        guess_of([0.5] * 64),
        drawing(),
    )
    found = [len(kept(loop, guess, row)) for _ in range(400)]
    assert abs(np.mean(found) - 32) < 1 and abs(np.var(found) - 16) < 4 and min(found) > 0


def drawing(**request):
    """A row whose tokens are drawn so."""
    rng = np.random.default_rng(0)
    return Row(np.array([1]), Standard(**request), rng, limit=9, max_context=LONGEST)


def test_the_order_is_that_of_what_tokens_are_drawn_from():
    """top_p leaves one token of the first slot and two of the second: the first is certain, and the model surer of the
    second.
    """
    p = np.array([[0.55, 0.15, 0.15, 0.15], [0.48, 0.48, 0.02, 0.02]])
    guess = Guess.of(np.arange(2), np.zeros(2, np.int64), np.log(p))
    assert guess.entropy[0] > guess.entropy[1]
    loop = DllmEntropy(steps=2, end=0.0)
    assert kept(loop, guess, drawing()).tolist() == [1]
    assert kept(loop, guess, drawing(temperature=1.0, top_p=0.5)).tolist() == [0]
    assert kept(loop, guess, drawing(temperature=1.0)).tolist() == [1], "the control"


def test_a_temperature_of_the_order_draws_by_its_softmax():
    """One of three slots: how often each stays, over 2000 seeds of one generator."""
    guess, row, heat = guess_of([0.95, 0.8, 0.6]), drawing(), 0.5
    loop = DllmEntropy(steps=3, end=0.0, order="confidence", order_temperature=heat)
    found = np.bincount([kept(loop, guess, row)[0] for _ in range(2000)], minlength=3) / 2000
    want = np.exp(guess.sure / heat) / np.exp(guess.sure / heat).sum()
    assert np.abs(found - want).max() < 4 * np.sqrt(0.25 / 2000)
    assert kept(replace(loop, order_temperature=0.0), guess, row).tolist() == [0]
    assert np.abs(found - 1 / 3).max() > 4 * np.sqrt(0.25 / 2000), "the control: it is not even"


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
