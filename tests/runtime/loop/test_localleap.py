"""localleap: which slots it adds to dllm-threshold's, and when it is that."""

import dataclasses
from dataclasses import replace

import numpy as np
import pytest

from accel.runtime.loop.dllm_threshold import DllmThreshold
from accel.runtime.loop.localleap import Localleap

from ...diffusion_case import BLOCK, Case, decoded, eager, guess_of, prompts


def leaping(threshold, relaxed, window):
    """Slots above the threshold, less sure ones near such a slot, and the surest, slot by slot."""

    def stays(seen):
        found = {int(seen.sure.argmax())}
        for i, one in enumerate(seen.sure):
            near = seen.sure[max(0, i - window) : i + window + 1].max() >= threshold
            if one >= threshold or (near and one >= relaxed):
                found.add(i)
        return sorted(found)

    return stays


CASES = [
    Case({"threshold": a, "relaxed": b, "window": w}, leaping(a, b, w))
    for a, b, w in ((0.6, 0.3, 2), (0.4, 0.1, 1))
]


def kept(sure, **options):
    return Localleap(**options).stays(guess_of(np.array(sure)), None).tolist()


def test_neighbours_of_an_anchor_stay_too():
    sure = [0.8, 0.1, 0.8, 0.3, 0.95, 0.8, 0.2, 0.2, 0.2, 0.8]
    assert kept(sure, window=2) == [2, 4, 5]
    assert kept(sure, window=4) == [0, 2, 4, 5]
    assert kept(sure, window=2, relaxed=0.2) == [2, 3, 4, 5, 6]


def test_without_an_anchor_the_surest_stays_alone():
    assert kept([0.8, 0.85, 0.8]) == [1]


def law_near(kind):
    """What stays is what the threshold alone keeps, and what is nearly as sure and no further than the window from it,
    by slots, whether they are masks or not.
    """
    rng, more = np.random.default_rng(0), 0
    for _ in range(50):
        slots = np.sort(rng.choice(40, 12, replace=False))
        guess = replace(guess_of(rng.random(12) ** 0.3), slots=slots)
        few, many = (set(m().stays(guess, None).tolist()) for m in (DllmThreshold, kind))
        assert few <= many
        anchors = [slot for slot, sure in zip(slots, guess.sure, strict=True) if sure >= 0.9]
        for at in many - few:
            assert guess.sure[at] >= 0.75 and min(abs(slots[at] - a) for a in anchors) <= 4
        more += len(many - few)
        assert anchors or len(many) == 1
    assert more > 20


@dataclasses.dataclass(frozen=True)
class CountsMasks(Localleap):
    """Takes the distance in masks for that in slots."""

    def stays(self, guess, place):
        return super().stays(replace(guess, slots=np.arange(len(guess))), place)


@dataclasses.dataclass(frozen=True)
class Anywhere(Localleap):
    """Needs no anchor."""

    def stays(self, guess, place):
        return np.union1d(guess.first(1), np.flatnonzero(guess.sure >= self.relaxed))


def test_more_stays_near_what_the_threshold_keeps():
    law_near(Localleap)


@pytest.mark.parametrize("wrong", [CountsMasks, Anywhere])
def test_another_neighbourhood_is_seen(wrong):
    with pytest.raises(AssertionError):
        law_near(wrong)


@pytest.mark.parametrize("same", [{"window": 0}, {"relaxed": 0.4}], ids=str)
def test_with_no_window_it_is_the_threshold(same):
    _, compiled = eager(False)
    shared = {"block": BLOCK, "threshold": 0.4}
    found = decoded(compiled, "localleap", prompts(), **shared, **same)
    assert found == decoded(compiled, "dllm-threshold", prompts(), **shared)
    assert found != decoded(compiled, "localleap", prompts(), **shared, relaxed=0.1)
