"""sched: its thresholds, patience, and prophet as a staircase."""

from dataclasses import dataclass, replace

import numpy as np
import pytest

from accel.runtime.loop._canvas import Place
from accel.runtime.loop.sched import Sched

from ...diffusion_case import BLOCK, Case, decoded, eager, guess_of, prompts, surest


def falling(least, aggregate, patience=None, most=0.0):
    """Whether the leads are large enough for the steps that are done, and the tokens were steady for long enough."""

    def ends(seen):
        before, memory = seen.memory.get("tokens", {}), seen.memory
        now = dict(zip(seen.masks.tolist(), seen.behind.argmax(1).tolist(), strict=True))
        changed = sum(before.get(slot) != token for slot, token in now.items()) / len(now)
        memory["steady"] = memory.get("steady", 0) + 1 if changed <= most else 0
        memory["tokens"] = now
        steady = patience is None or memory["steady"] > patience
        step, steps = seen.slots[0] - seen.start + seen.step, seen.end - seen.start
        return steady and float(aggregate(seen.lead)) >= least(step / (steps - 1))

    return ends


def exponential(t):
    return 0.5 + 5.5 * np.exp(-3 * t)


def cosine(t):
    return 0.5 + 3.75 * (1 + np.cos(np.pi * t))


CASES = [
    Case({"high": 9.0, "low": 1.0, "patience": -1}, surest(1), falling(lambda t: 9 - 8 * t, np.mean)),
    Case(
        {"high": 8.0, "low": 0.5, "schedule": "cosine", "over": "least", "patience": -1},
        surest(1), falling(cosine, np.min),
    ),
    Case(
        {"high": 6.0, "low": 0.5, "schedule": "exponential", "rate": 3.0, "most_changed": 0.3},
        surest(1), falling(exponential, np.mean, 0, 0.3),
    ),
]  # fmt: skip


def test_thresholds_fall_from_high_to_low():
    for schedule, end in (("linear", 2.5), ("cosine", 2.5), ("exponential", 2.5 + 5 * np.exp(-4))):
        loop = Sched(schedule=schedule)
        levels = [loop.least(i / 32, i / 33) for i in range(33)]
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


def law_patience(kind):
    """It ends behind more calls without a change, in a row, than patience says."""
    said = [[1, 2], [1, 2], [1, 3], [1, 3], [1, 3]]
    for patience, want in ((-1, [1, 1, 1, 1, 1]), (0, [0, 1, 0, 1, 1]), (1, [0, 0, 0, 0, 1])):
        loop, memory = kind(patience=patience), kind().begin(None)
        assert [asked(loop, memory, t, [9, 9]) for t in said] == [bool(w) for w in want]
    loose, memory = kind(most_changed=0.5), kind().begin(None)
    assert [asked(loose, memory, t, [9, 9]) for t in ([1, 2], [1, 3], [4, 5])] == [0, 1, 0]


@dataclass(frozen=True)
class Counts(Sched):
    """Counts calls without a change, in a row or not."""

    def _steady(self, guess, memory):
        before = memory["steady"]
        return max(before, super()._steady(guess, memory))


@dataclass(frozen=True)
class NeverFirst(Sched):
    """Takes a first call for one without a change."""

    def begin(self, row):
        return {"tokens": {}, "steady": 1}

    def _steady(self, guess, memory):
        memory["tokens"] = memory["tokens"] or dict(
            zip(guess.slots.tolist(), guess.tokens.tolist(), strict=True)
        )
        return super()._steady(guess, memory)


def test_patience_waits_until_tokens_are_steady():
    law_patience(Sched)


@pytest.mark.parametrize("wrong", [Counts, NeverFirst])
def test_another_patience_is_seen(wrong):
    with pytest.raises(AssertionError):
        law_patience(wrong)


@pytest.mark.parametrize("steps", [0, 3, 8])
@pytest.mark.parametrize("answer", [1, 8, 21, 24])
def test_time_goes_from_0_to_1(steps, answer):
    """Over all calls of an answer, whose last block may be shorter."""
    loop, times = Sched(block=BLOCK, steps=steps), []
    for before in range(0, answer, BLOCK):
        masks = min(BLOCK, answer - before)
        for step in range(loop.calls(masks)):
            rng, hidden = np.random.default_rng(0), np.ones(masks, bool)
            place = Place(step, masks, hidden, before, before, answer, None, rng)
            times.append(loop._time(place))
    assert times[0] == 0 and (answer == 1 or times[-1] == 1)
    assert np.allclose(np.diff(times), 1 / max(1, len(times) - 1))


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
