"""dparallel: what stays below an entropy, and the ends of it."""

import dataclasses

import numpy as np
import pytest

import accel
from accel.runtime.loop._canvas import Guess
from accel.runtime.loop.dparallel import Dparallel

from ...diffusion_case import BLOCK, NEW, Case, decoded, eager, prompts


def certain(most):
    """Every mask with no more entropy, and the one with the least, slot by slot."""

    def stays(seen):
        least = min(seen.entropy)
        return [i for i, h in enumerate(seen.entropy) if h <= most or h == least]

    return stays


CASES = [Case({"threshold": 0.6}, certain(0.6)), Case({"threshold": 1.8}, certain(1.8))]


def law_entropies(kind):
    """The mask of the least entropy stays, and all within the threshold, of which there are more as it grows."""
    for seed in range(20):
        logits = np.random.default_rng(seed).standard_normal((9, 12)) * 4
        guess, before = Guess.of(np.arange(9), logits.argmax(1), logits), set()
        for threshold in (0.0, 0.3, 0.8, 1.6, 9.0):
            kept = set(kind(threshold=threshold).stays(guess, None).tolist())
            within = set(np.flatnonzero(guess.entropy <= threshold).tolist())
            assert kept == within | {int(guess.entropy.argmin())} and before <= kept
            before = kept
        assert len(before) == 9


@dataclasses.dataclass(frozen=True)
class BySurest(Dparallel):
    """Takes the most probable token for that of the least entropy."""

    def stays(self, guess, place):
        return np.union1d(np.flatnonzero(guess.entropy <= self.threshold), guess.first(1))


def test_masks_stay_by_their_entropy():
    law_entropies(Dparallel)


def test_another_surest_is_seen():
    with pytest.raises(AssertionError):
        law_entropies(BySurest)


def test_ends_of_its_threshold():
    _, compiled = eager(True)
    assert decoded(compiled, "dparallel", prompts(), block=BLOCK, threshold=0.0)[1] == [NEW, NEW]
    once = decoded(compiled, "dparallel", prompts(), block=BLOCK, threshold=1e9)
    assert once == decoded(compiled, "dllm-threshold", prompts(), block=BLOCK, threshold=0.0)


def test_an_entropy_below_none_is_refused():
    with pytest.raises(accel.RecipeError, match="threshold is -0.1; give at least 0"):
        Dparallel(threshold=-0.1)
