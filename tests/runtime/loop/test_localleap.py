"""localleap: which slots it adds to dllm-threshold's, and when it is that."""

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


def test_distances_count_slots_that_are_filled():
    guess = guess_of(np.array([0.95, 0.8]))
    near, far = np.array([3, 7]), np.array([3, 8])
    for slots, want in ((near, [0, 1]), (far, [0])):
        object.__setattr__(guess, "slots", slots)
        assert Localleap().stays(guess, None).tolist() == want


def test_more_stays_than_with_the_threshold_alone():
    rng = np.random.default_rng(0)
    more = 0
    for _ in range(100):
        guess = guess_of(rng.random(12) ** 0.3)
        few, many = (set(m().stays(guess, None).tolist()) for m in (DllmThreshold, Localleap))
        assert few <= many
        more += len(many) > len(few)
    assert more > 20


@pytest.mark.parametrize("same", [{"window": 0}, {"relaxed": 0.4}], ids=str)
def test_with_no_window_it_is_the_threshold(same):
    _, compiled = eager(False)
    shared = {"block": BLOCK, "threshold": 0.4}
    found = decoded(compiled, "localleap", prompts(), **shared, **same)
    assert found == decoded(compiled, "dllm-threshold", prompts(), **shared)
    assert found != decoded(compiled, "localleap", prompts(), **shared, relaxed=0.1)
