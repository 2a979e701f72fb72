"""dkv-greedy: what a call computes is few slots, of whose masks the loop chooses."""

import numpy as np

from accel.runtime.canvas.dkv_greedy import DkvGreedy
from accel.runtime.loop.dllm_lowconf import DllmLowconf

from ...diffusion_case import Fed, prompts
from ..canvas_case import followed


def published(refresh, window):
    """The newest tokens, and the block's first masks with what says them."""

    def rule():
        masks = None

        def feeds(before):
            nonlocal masks
            newest = np.zeros(before.open.size, np.bool_) if masks is None else masks & ~before.open
            masks = before.open.copy()
            if before.step % refresh == 0:
                return np.ones(before.open.size, np.bool_)
            for slot in [s for s in range(before.first, before.last) if masks[s]][:window]:
                newest[[slot, slot - before.shift]] = True
            return newest

        return feeds

    return rule


CASES = [Fed({}, published(2, 4)), Fed({"refresh": 5, "window": 2}, published(5, 2))]


def test_a_call_is_of_the_newest_tokens_and_a_window():
    """One token a call: between refreshes 1 + `window` slots, and the tokens that were filled are among them."""
    seen = followed(DllmLowconf(block=16), DkvGreedy(refresh=6, window=3), False, prompts(0, (5,)))
    few = [(i, fed) for i, fed in enumerate(seen.fed) if len(fed) < seen.ids[i].size]
    assert len(few) > 10 and max(len(fed) for _, fed in few) == 4
    for i, fed in few:
        assert set(seen.filled[i - 1]) <= fed.keys() and set(seen.filled[i]) <= fed.keys()
