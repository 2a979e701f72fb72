"""recompute-window: what a call computes, with apd, whose window it is, and that no token stays as a mask was."""

import numpy as np
import pytest

from accel.runtime.canvas import Sheet
from accel.runtime.canvas.recompute_window import RecomputeWindow
from accel.runtime.loop.dllm_lowconf import DllmLowconf

from ...diffusion_case import Fed, decoded, eager, prompts
from ..canvas_case import followed


def published(window):
    """From so far left of the first new token or mask on."""

    def rule():
        masks = None

        def feeds(before):
            nonlocal masks
            new = np.ones(before.open.size, np.bool_) if masks is None else masks
            masks = before.open.copy()
            left = max(0, int(np.flatnonzero(new)[0]) - window + 1)
            fed = np.arange(before.open.size) >= left
            for slot in np.flatnonzero(before.open):
                fed[max(0, slot - before.shift)] = True
            return fed

        return feeds

    return rule


CASES = [Fed({"window": 1}, published(1)), Fed({"window": 3}, published(3))]


@pytest.mark.parametrize("window", [1, 4])
def test_each_token_is_computed_once_more(window):
    """Calls are small, and one after that which fills a slot computes it."""
    seen = followed(DllmLowconf(block=4), RecomputeWindow(window=window), True, prompts(0, (9,)))
    assert len(seen.fed[0]) == seen.ids[0].size > len(seen.fed[-1])
    for i, filled in enumerate(seen.filled[:-1]):
        assert set(filled) <= seen.fed[i + 1].keys()


def test_a_window_of_the_whole_text_is_every_slot_in_every_call():
    _, compiled = eager(True)
    found = [
        decoded(compiled, "apd", prompts(1, (5, 9)), block=8, mixture=0.9, canvas=canvas)
        for canvas in ("whole", {"use": "recompute-window", "window": 96}, "recompute-window")
    ]
    assert found[0] == found[1]


def test_what_the_papers_code_keeps():
    """curr - W - n + 1 slots, of `n` tokens that the call before filled, up to slot `curr`."""
    window, current, n = 5, 20, 3
    masks = np.arange(30) >= current
    age = np.where(np.arange(30) >= current - n, 0, 7)
    sheet = Sheet(0, current, 30, masks, age, 1)
    first = int(RecomputeWindow(window=window).feeds(sheet).argmax())
    assert first == current - window - n + 1
