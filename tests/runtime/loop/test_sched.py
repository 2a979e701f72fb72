"""sched: its thresholds, patience, and prophet as a staircase."""

from dataclasses import replace

import numpy as np
import pytest

from accel.runtime.loop._canvas import Place
from accel.runtime.loop.sched import Sched

from ...diffusion_case import BLOCK, decoded, eager, guess_of, prompts


def test_thresholds_fall_from_high_to_low():
    for schedule, end in (("linear", 2.5), ("cosine", 2.5), ("exponential", 2.5 + 5 * np.exp(-4))):
        loop = Sched(schedule=schedule)
        levels = [loop.least(i, 33) for i in range(33)]
        assert levels[0] == 7.5 and levels[-1] == pytest.approx(end)
        assert all(a > b for a, b in zip(levels, levels[1:], strict=False))


def test_a_staircase_without_patience_is_prophet():
    _, compiled = eager(False)
    levels = {"high": 5.0, "low": 2.0}
    found = decoded(
        compiled, "sched", prompts(), block=BLOCK, schedule="staircase", patience=-1, **levels
    )
    three = {"early": 5.0, "middle": 3.5, "late": 2.0}
    assert found == decoded(compiled, "prophet", prompts(), block=BLOCK, **three)
    linear = decoded(compiled, "sched", prompts(), block=BLOCK, patience=-1, **levels)
    assert linear[1] != found[1], "the control: another schedule ends elsewhere"


def asked(loop, memory, tokens, lead):
    guess = guess_of(np.full(len(tokens), 0.5))
    guess = replace(guess, tokens=np.array(tokens), lead=np.array(lead, float))
    place = Place(3, 8, np.ones(8, bool), 0, 0, 8, memory, np.random.default_rng(0))
    return loop.ends(guess, place)


def test_patience_waits_until_tokens_are_steady():
    for patience, want in ((-1, [1, 1, 1, 1, 1]), (0, [0, 1, 0, 1, 1]), (1, [0, 0, 0, 0, 1])):
        loop, memory = Sched(patience=patience), Sched().begin(None)
        found = [asked(loop, memory, t, [9, 9]) for t in ([1, 2], [1, 2], [1, 3], [1, 3], [1, 3])]
        assert found == [bool(w) for w in want]
    loose, memory = Sched(most_changed=0.5), Sched().begin(None)
    assert [asked(loose, memory, t, [9, 9]) for t in ([1, 2], [1, 3], [4, 5])] == [0, 1, 0]


def test_the_least_lead_ends_no_earlier_than_the_mean():
    for leads in ([9.0, 1.0], [9.0, 6.5], [2.0, 2.0]):
        ends = {
            over: asked(Sched(over=over, patience=-1), Sched().begin(None), [1, 2], leads)
            for over in ("mean", "median", "least")
        }
        assert ends["mean"] or not ends["least"]


def test_a_threshold_that_is_never_reached_is_one_token_per_call():
    _, compiled = eager(True)
    never = decoded(compiled, "sched", prompts(), block=BLOCK, high=1e9, low=1e9)
    assert never == decoded(compiled, "dllm-lowconf", prompts(), block=BLOCK)
    at_once = {"high": -1.0, "low": -1.0}
    assert decoded(compiled, "sched", prompts(), patience=-1, **at_once)[1] == [1, 1]
    assert decoded(compiled, "sched", prompts(), **at_once)[1] > [1, 1], "patience takes two calls"
